// included once, by server-context.cpp, where server_res_generator is known: the HTTP side of server-blocks.h

#pragma once

// what /props says of the block calls; once, before the first request
void server_routes::update_blocks() {
    server_context_meta with = *meta;
    with.evoke = ctx_server.blocks.props();
    meta = std::make_unique<server_context_meta>(std::move(with));
}

// run one call on the main loop and answer with what it says
std::unique_ptr<server_res_generator> server_routes::handle_blocks(const server_http_req & req, server_blocks_call call) {
    auto res = create_response();
    if (!ctx_server.blocks.enabled()) {
        const std::string why = meta->evoke.is_null() ? ". Start it with `--evoke-ram N`" : ": " + json_value(meta->evoke, "unsupported", std::string());
        res->error(format_error_response("This server does not support block calls" + why, ERROR_TYPE_NOT_SUPPORTED));
        return res;
    }
    const std::string id_slot = req.get_param("id_slot");
    if (!id_slot.empty()) {
        const bool digits = id_slot.size() < 9 && id_slot.find_first_not_of("0123456789") == std::string::npos;
        call.id_slot = digits ? std::stoi(id_slot) : -1;
    }
    if (server_blocks::is_action(call.action)) {
        ctx_server.blocks.look_at_disk();
    }
    const auto shared = std::make_shared<server_blocks_call>(std::move(call));
    json data;
    do {
        const auto visit = create_response(); // a reader of results is for one task
        server_task task(SERVER_TASK_TYPE_EVOKE);
        task.id    = visit->rd.get_new_id();
        task.evoke = shared;
        visit->rd.post_task(std::move(task), true); // high-priority: between two decodes, never deferred

        auto result = visit->rd.next(req.should_stop);
        if (!result) {
            return res; // the client is gone
        }
        data = result->to_json();
        if (shared->waits) {
            ctx_server.blocks.work(*shared); // files are read here, not on the main loop
        }
    } while (shared->waits);
    if (data.contains("error")) {
        res->error(data.at("error"));
        res->headers["X-Evoke-Error"] = data.at("error").at("type").get<std::string>(); // keeps upstream's 404 page away
    } else {
        res->ok(data);
    }
    return res;
}

std::unique_ptr<server_res_generator> server_routes::handle_blocks_post(const server_http_req & req) {
    server_blocks_call call;
    call.action = req.get_param("action");
    call.body   = server_blocks_parse(req.body.empty() ? "{}" : req.body);
    server_blocks_check(call.body);
    return handle_blocks(req, std::move(call));
}

std::unique_ptr<server_res_generator> server_routes::handle_blocks_get(const server_http_req & req) {
    server_blocks_call call;
    const bool attention = string_ends_with(req.path, "/attention");
    call.action = attention ? "attention" : "info";
    call.body   = json { {"tenant", req.get_param("tenant")}, {"since", req.get_param("since")} };
    for (const char * key : { "ranges", "per_head" }) {
        if (attention && !req.get_param(key).empty()) {
            call.body[key] = req.get_param(key);
        }
    }
    server_blocks_check(call.body);
    return handle_blocks(req, std::move(call));
}

// tokens and message spans of a request, exactly as this server would decode it, and how much of it each slot holds
std::unique_ptr<server_res_generator> server_routes::handle_render(const server_http_req & req) {
    const auto awake = create_response(); // a server that sleeps has no vocabulary: wake it first
    const json request = server_blocks_parse(req.body);
    const std::string dialect = json_value(request, "dialect", std::string("chat"));
    if (!request.contains("body") || !request.at("body").is_object()) {
        throw std::invalid_argument("\"body\" must be the request to render");
    }
    if (request.contains("compact") && !request.at("compact").is_boolean()) {
        throw std::invalid_argument("\"compact\" must be true or false");
    }
    const auto known = server_blocks_edges_of(json_value(request, "known", json::array()));
    json body = request.at("body");
    if (dialect == "responses") {
        body = server_chat_convert_responses_to_chatcmpl(body);
    } else if (dialect == "messages") {
        body = server_chat_convert_anthropic_to_oai(body);
    } else if (dialect != "chat" && dialect != "completions") {
        throw std::invalid_argument("\"dialect\" must be chat, responses, messages or completions");
    }
    std::vector<raw_buffer> files;
    const json parsed = dialect == "completions" ? body : oaicompat_chat_params_parse(body, meta->chat_params, files);
    if (!files.empty()) {
        throw std::invalid_argument("media cannot be rendered to tokens");
    }
    auto inputs = tokenize_input_prompts(ctx_server.vocab, nullptr, parsed.at("prompt"), true, true, ctx_server.init_opt);
    if (inputs.size() != 1) {
        throw std::invalid_argument("exactly one prompt can be rendered");
    }

    server_blocks_call call;
    call.action = "view";
    call.tokens = inputs[0].get_text_tokens();
    const llama_tokens tokens = call.tokens;
    auto res = handle_blocks(req, std::move(call));
    if (res->status != 200 || res->data.empty()) {
        return res;
    }
    int32_t n_generation = (int32_t) tokens.size();
    json spans = json::array();
    const server_blocks_text rendered(ctx_server.vocab, tokens);
    std::vector<int32_t> stops;
    if (parsed.at("prompt").is_string()) {
        const json messages = dialect == "completions" ? json::array() : body.at("messages");
        spans = server_blocks_spans(ctx_server.vocab, tokens, rendered, parsed.at("prompt").get<std::string>(), messages,
            json_value(parsed, "generation_prompt", std::string()), n_generation, stops);
    }
    json data = json::parse(res->data);
    data["generation"] = n_generation;
    if (json_value(request, "compact", false)) {
        res->data = server_blocks_compact(std::move(data), tokens, spans, stops, known);
        return res;
    }
    data["tokens"] = tokens;
    data["spans"]  = spans;
    data["stops"]  = stops;
    res->ok(data);
    return res;
}
