#pragma once

// What a request gets that waits for a result when the server stops: no task is processed any more.

#include "server-task.h"

#include <memory>

// The reply 503 to such a request; without it the handler waits until its client disconnects, and the server with it.
inline server_task_result_ptr server_shutdown_error() {
    auto error = std::make_unique<server_task_result_error>();
    error->err_type = ERROR_TYPE_UNAVAILABLE;
    error->err_msg  = "the server is stopping";
    return error;
}
