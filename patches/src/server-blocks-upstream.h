#pragma once

// What differs between the supported releases of llama.cpp and is used by our files. There is an overload for each form
// of an upstream function, and the compiler takes the one that fits: no release is named in code. Patches that only one
// release needs are in patches/pins.
//
// Threads: any.

#include "server-common.h"

#include <string>
#include <utility>
#include <vector>

// What oaicompat_chat_params_parse() returns beside the parameters: from b11549 on a chat session, before that nothing.
struct server_blocks_no_session {};

template <typename Session>
Session server_blocks_session_type(json (*)(const llama_vocab *, json &, const server_chat_params &, std::vector<raw_buffer> &, Session &));
server_blocks_no_session server_blocks_session_type(json (*)(json &, const server_chat_params &, std::vector<raw_buffer> &));

using server_blocks_session = decltype(server_blocks_session_type(oaicompat_chat_params_parse));

// A chat request, rendered with the template of the model.
struct server_blocks_chat {
    json                  params;            // for a completion, with "prompt"
    std::string           generation_prompt; // end of the prompt: it begins the reply of the assistant
    server_blocks_session session {};        // to be passed on with server_blocks_with_session()
};

template <typename Session>
server_blocks_chat server_blocks_parse_chat(json (*parse)(const llama_vocab *, json &, const server_chat_params &, std::vector<raw_buffer> &, Session &),
        const llama_vocab * vocab, json & body, const server_chat_params & chat, std::vector<raw_buffer> & files) {
    Session session;
    json params = parse(vocab, body, chat, files, session);
    std::string generation_prompt = session.generation_prompt();
    return { std::move(params), std::move(generation_prompt), std::move(session) };
}

inline server_blocks_chat server_blocks_parse_chat(json (*parse)(json &, const server_chat_params &, std::vector<raw_buffer> &),
        const llama_vocab *, json & body, const server_chat_params & chat, std::vector<raw_buffer> & files) {
    json params = parse(body, chat, files);
    std::string generation_prompt = json_value(params, "generation_prompt", std::string());
    return { std::move(params), std::move(generation_prompt), {} };
}

// Calls an upstream function whose last parameter is the session, or that has no such parameter:
//   server_blocks_with_session(session, [&](const auto &... last) { return handle_completions_impl(a, b, last...); });
template <typename Session, typename Call> auto server_blocks_with_session(const Session & session, Call call) {
    return call(session);
}

template <typename Call> auto server_blocks_with_session(const server_blocks_no_session &, Call call) {
    return call();
}

// Returns about how many bytes of memory a session takes beside the schemas of its tools: its prompt, its grammar and the
// rules of its parser. 0 where there are none.
template <typename Session> size_t server_blocks_session_bytes(const Session & session) {
    return sizeof(session) + session.prompt().size() + session.grammar().size() + 512*session.parser().size();
}

inline size_t server_blocks_session_bytes(const server_blocks_no_session &) {
    return 0;
}

// Returns whether the model answers /v1/systemone and generates no text. Such models came with b11549. The second argument
// is 0, which prefers the first overload where it compiles.
template <typename Model>
auto server_blocks_is_decision_model(const Model * model, int) -> decltype(bool(common_get_decision_type(model))) {
    return bool(common_get_decision_type(model)); // COMMON_DECISION_TYPE_NONE is 0
}

template <typename Model> bool server_blocks_is_decision_model(const Model *, long) {
    return false;
}
