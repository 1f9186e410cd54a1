// The HTTP routes of the block calls. server-context.cpp includes this file once, after server_res_generator is defined.

#pragma once

#include "server-blocks-upstream.h"

// Adds the part of /props that describes block calls. Called once, before the first request.
void server_routes::update_blocks() {
    server_context_meta with_blocks = *meta;
    with_blocks.evoke = ctx_server.blocks.props();
    meta = std::make_unique<server_context_meta>(std::move(with_blocks));
}

// Runs one call on the main loop and answers with its reply.
std::unique_ptr<server_res_generator> server_routes::handle_blocks(const server_http_req & req, server_blocks_call call) {
    auto res = create_response();
    if (!ctx_server.blocks.enabled()) {
        const std::string reason = meta->evoke.is_null() ? ". Start it with `--evoke-ram MiB`" : ": " + json_value(meta->evoke, "unsupported", std::string());
        res->error(format_error_response("This server does not support block calls" + reason, ERROR_TYPE_NOT_SUPPORTED));
        return res;
    }
    const std::string id_slot = req.get_param("id_slot");
    if (!id_slot.empty()) {
        const bool digits = id_slot.size() < 9 && id_slot.find_first_not_of("0123456789") == std::string::npos;
        call.id_slot = digits ? std::stoi(id_slot) : -1;
    }
    if (server_blocks_calls::is_action(call.action)) {
        ctx_server.blocks.refresh_disk();
    }
    const auto shared = std::make_shared<server_blocks_call>(std::move(call));
    json data;
    do {
        const auto round = create_response(); // its reader of results serves one task only
        server_task task(SERVER_TASK_TYPE_EVOKE);
        task.id    = round->rd.get_new_id();
        task.evoke = shared;
        round->rd.post_task(std::move(task), true); // high priority: between two decodes, never deferred

        auto result = round->rd.next(req.should_stop);
        if (!result) {
            return res; // the client has disconnected
        }
        if (result->is_error()) {
            res->error(result->to_json()); // the server is stopping
            return res;
        }
        data = result->to_json();
        if (shared->waits) {
            ctx_server.blocks.do_disk_work(*shared); // files are read here, not on the main loop
        }
    } while (shared->waits);
    if (data.contains("error")) {
        res->error(data.at("error"));
        res->headers["X-Evoke-Error"] = data.at("error").at("type").get<std::string>(); // keeps upstream from replacing a 404
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

// Answers a request whose marker names its rendering, without rendering it again. Returns nullptr when there is none.
std::unique_ptr<server_res_generator> server_routes::handle_rendered(const server_http_req & req, task_response_type res_type) {
    static const std::map<task_response_type, std::string> dialects = {
        { TASK_RESPONSE_TYPE_OAI_CHAT, "chat" }, { TASK_RESPONSE_TYPE_OAI_RESP, "responses" }, { TASK_RESPONSE_TYPE_ANTHROPIC, "messages" },
    };
    server_blocks_rendering rendering;
    if (!ctx_server.blocks.enabled() || !ctx_server.blocks.renderings.take(req.body, dialects.at(res_type), rendering)) {
        return nullptr;
    }
    return server_blocks_with_session(rendering.session, [&](const auto &... session) {
        return handle_completions_impl(req, SERVER_TASK_TYPE_COMPLETION, rendering.parsed, {}, res_type, session...);
    });
}

// Returns the tokens and message spans of a request, exactly as this server would decode it, and how many of these tokens
// each slot has.
std::unique_ptr<server_res_generator> server_routes::handle_render(const server_http_req & req) {
    const auto awake = create_response(); // wakes a sleeping server: it has no vocabulary
    json request = server_blocks_parse(req.body);
    const std::string dialect = json_value(request, "dialect", std::string("chat"));
    if (!request.contains("body") || !request.at("body").is_object()) {
        throw std::invalid_argument("\"body\" must be the request to render");
    }
    for (const std::string key : { "compact", "keep" }) {
        if (request.contains(key) && !request.at(key).is_boolean()) {
            throw std::invalid_argument("\"" + key + "\" must be true or false");
        }
    }
    const auto previous = server_blocks_render::parse_edges(json_value(request, "known", json::array()));
    const auto [n_behind, n_before] = server_blocks_render::parse_behind(request);
    json body = std::move(request.at("body"));
    if (dialect == "responses") {
        body = server_chat_convert_responses_to_chatcmpl(body);
    } else if (dialect == "messages") {
        body = server_chat_convert_anthropic_to_oai(body);
    } else if (dialect != "chat" && dialect != "completions") {
        throw std::invalid_argument("\"dialect\" must be chat, responses, messages or completions");
    }
    std::vector<raw_buffer> files;
    auto rendered = dialect == "completions"
        ? server_blocks_chat { body, json_value(body, "generation_prompt", std::string()), {} }
        : server_blocks_parse_chat(oaicompat_chat_params_parse, ctx_server.vocab, body, meta->chat_params, files);
    const json prompt = rendered.params.at("prompt");
    if (!files.empty() && !server_blocks_media_supported()) {
        throw std::invalid_argument("a request with images or sounds cannot be rendered: blocks work on text only with this model (M-RoPE)");
    }
    std::vector<server_tokens> inputs;
    if (ctx_server.mctx && dialect != "completions") {
        inputs.push_back(process_mtmd_prompt(ctx_server.mctx, prompt.get<std::string>(), files, ctx_server.init_opt));
    } else {
        inputs = tokenize_input_prompts(ctx_server.vocab, ctx_server.mctx, prompt, true, true, ctx_server.init_opt);
    }
    if (inputs.size() != 1) {
        throw std::invalid_argument("exactly one prompt can be rendered");
    }

    const llama_tokens tokens = server_blocks_ids(inputs[0]);
    server_blocks_render render(ctx_server.vocab, tokens, server_blocks_media(inputs[0]));
    if (prompt.is_string()) {
        const json messages = dialect == "completions" ? json::array() : body.at("messages");
        render.locate_messages(prompt.get<std::string>(), messages, rendered.generation_prompt);
    }

    server_blocks_call call;
    call.action = "view";
    call.behind = n_behind;
    call.tokens.assign(tokens.begin() + render.end_of(n_before), tokens.end());
    auto res = handle_blocks(req, std::move(call));
    if (res->status != 200 || res->data.empty()) {
        return res;
    }
    json data = json::parse(res->data);
    if (json_value(request, "keep", false) && files.empty() && dialect != "completions" && params.path_prompts_log_dir.empty()) {
        json & parsed = rendered.params;
        parsed.erase("messages"); // its text is in the prompt
        if (!ctx_server.mctx) {
            parsed["prompt"] = tokens;
        }
        data["rendering"] = ctx_server.blocks.renderings.keep({ get_tenant(request), dialect,
            std::string(server_blocks_member_text(req.body, "body")), std::move(parsed), std::move(rendered.session) });
    }
    if (json_value(request, "compact", false)) {
        res->data = render.compact(data, previous);
    } else {
        res->ok(render.expanded(data));
    }
    return res;
}
