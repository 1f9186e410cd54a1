// Tests that block calls and attention capture are refused under tensor parallelism, with the reason: on the meta
// backend over two devices that are both the CPU.
// usage: split_mode MODEL; prints one line per check; exit status 1 after the first that fails

#include "llama-attn-capture.h"
#include "llama-kv-block.h"

#include "ggml-backend.h"
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static void expect(bool fact, const char * what, const char * value) {
    printf("%s: %s: %s\n", fact ? "ok" : "NOT SO", what, value ? value : "nothing");
    if (!fact) {
        exit(1);
    }
}

static const char * unsupported_reason(const char * path, llama_split_mode mode, bool two) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    std::vector<ggml_backend_dev_t> devices { cpu, cpu, nullptr };
    auto params = llama_model_default_params();
    params.split_mode = mode;
    params.devices    = two ? devices.data() : nullptr;
    auto * model = llama_model_load_from_file(path, params);
    expect(model != nullptr, "the model is loaded", path);
    auto settings = llama_context_default_params();
    settings.n_ctx           = 256;
    settings.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    auto * ctx = llama_init_from_model(model, settings);
    expect(ctx != nullptr, "there is a context", path);
    const char * res     = llama_kv_block_unsupported(ctx);
    const char * capture = llama_attn_capture_unsupported(ctx);
    expect(!capture == !res, "attention is refused where blocks are", capture);
    llama_free(ctx);
    llama_model_free(model);
    return res;
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        return 2;
    }
    ggml_backend_load_all();
    expect(unsupported_reason(argv[1], LLAMA_SPLIT_MODE_LAYER, false) == nullptr, "one device", "");
    const char * reason = unsupported_reason(argv[1], LLAMA_SPLIT_MODE_TENSOR, true);
    expect(reason && strstr(reason, "--split-mode tensor"), "two devices, tensor parallelism", reason);
    return 0;
}
