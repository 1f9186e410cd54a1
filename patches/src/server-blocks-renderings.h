#pragma once

// Renderings of requests that are forwarded soon: such a request is neither parsed nor rendered a second time.
//
// Owns: what the route of a request makes of its body, with the tokens of its prompt and, in releases that have one, the
//       session that parses the reply, until the request comes.
// Threads: any.
// Invariants: a rendering is used only for a request with exactly the bytes that were rendered, after the marker; and
//             once. All of them together are limited in number, bytes and age.

#include "server-blocks-upstream.h"
#include "server-common.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

struct server_blocks_rendering {
    std::string tenant;
    std::string dialect;
    std::string body;   // the JSON text of the request
    json        parsed; // what its route makes of it
    server_blocks_session session {}; // the same
};

class server_blocks_renderings {
public:
    // Keeps a rendering. Returns its id, 32 random hexadecimal digits, or "" when it is too large. When the limits are
    // reached, the tenant with most bytes loses its oldest one.
    std::string keep(server_blocks_rendering rendering);

    // Sets `rendering` to that of a request that names it, with the members of the request's marker in `parsed`.
    // Returns false when the request names none, or one that is not kept any more or is that of another text.
    bool take(const std::string & request, const std::string & dialect, server_blocks_rendering & rendering);

    void clear();

private:
    struct entry {
        server_blocks_rendering rendering;
        size_t   n_bytes;
        int64_t  kept_ms;
        uint64_t number; // ascending by age
    };
    using entry_map = std::map<std::string, entry>; // by id

    void remove(entry_map::iterator it);
    void remove_old();
    void make_room();

    std::mutex mutex;
    entry_map  entries;
    std::map<std::string, size_t> tenant_bytes;
    size_t     n_bytes    = 0;
    uint64_t   n_kept     = 0;
};

// Returns the text of a member of the JSON object in `text`, which must be valid JSON; empty when there is none.
std::string_view server_blocks_member_text(std::string_view text, std::string_view key);
