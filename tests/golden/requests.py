"""The requests whose forwarded bytes are golden: every dialect, unusual spellings, own fields."""

from __future__ import annotations

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS = ("/v1/completions", "/completions", "/completion", "/infill")
COUNTS = (f"{CHAT}/input_tokens", f"{RESPONSES}/input_tokens", f"{MESSAGES}/count_tokens")
DIALECTS = {
    "chat": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "completions": "/completion",
}

PLAIN = {
    CHAT: b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1}',
    RESPONSES: b'{"input":"Hi","max_output_tokens":1}',
    MESSAGES: b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1}',
    "/completion": b'{"prompt":"Hi","n_predict":1}',
}
# Spellings that must not change: white space, escapes, order, numbers, keys that nobody knows.
ODD = {
    CHAT: (
        b'\n{ "unknown" : {"b":1,"a":[ 1.0 , 1e2,-0 ]},\t"messages" : [ {"content":"a\\u0041'
        b"\\ud83d\\ude00 \xc3\xa9" + b'", "role":"user"} ] , "max_tokens":1 }\n'
    ),
    RESPONSES: b'{ "max_output_tokens" : 1, "input" : [ {"role":"user","content":"\\u00e9"} ]}',
    MESSAGES: (
        b'{ "max_tokens":1 , "system":[{"type":"text","text":"S"}], "messages" : ['
        b'{"role":"user","content":[{"type":"text","text":"a  b"}]}]}'
    ),
    "/completion": b'{ "n_predict":1,\r\n"prompt" : [1, 2,3] }',
}
_OURS = (
    b'"evoke_budget":2048,"evoke_policy":"evoke","evoke_recovery":"kv_restore",'
    b'"evoke_recall":"text","evoke_priority":2,"evoke_pinned":false,"evoke_task_boundary":true,'
    b'"evoke_session":"s1","evoke_recover":[],'
)
TAGGED = {
    CHAT: (
        b"{" + _OURS + b'"messages":[{"role":"user","content":"Hi","evoke_keep":"pin",'
        b'"evoke_name":"n"}],"max_tokens":1}'
    ),
    RESPONSES: (
        b"{" + _OURS + b'"input":[{"evoke_keep":"prefer","role":"user","content":"Hi"}],'
        b'"max_output_tokens":1}'
    ),
    MESSAGES: (
        b"{" + _OURS + b'"messages":[{"role":"user","content":"Hi","evoke_name":"n"}],'
        b'"max_tokens":1}'
    ),
    "/completion": b"{" + _OURS + b'"prompt":"Hi","n_predict":1}',
}
OFF = {path: b'{"evoke":false,' + body[1:] for path, body in PLAIN.items()}
STREAM = {path: b'{"stream":true,' + body[1:] for path, body in PLAIN.items()}
BODIES = {"plain": PLAIN, "odd": ODD, "tagged": TAGGED, "off": OFF, "stream": STREAM}

# Fronts that `normalise` makes the same.
DRIFTING = (
    b'{"messages":[{"role":"system","content":"x-anthropic-billing-header: cc=1; '
    b'You help.\\nToday is 2026-03-04."},{"role":"user","content":"Hi"}],"tools":['
    b'{"type":"function","function":{"name":"b"}},{"type":"function","function":{"name":"a"}}],'
    b'"max_tokens":1}',
    b'{"messages":[{"role":"system","content":"x-anthropic-billing-header: cc=2; '
    b'You help.\\nToday is 2026-03-05."},{"role":"user","content":"Hi"}],"tools":['
    b'{"type":"function","function":{"name":"a"}},{"type":"function","function":{"name":"b"}}],'
    b'"max_tokens":1}',
)

HEADERS = {
    "Accept": "*/*",
    "User-Agent": "golden/1",
    "X-Custom": "kept",
    "Authorization": "Bearer theirs",
    "X-Api-Key": "theirs",
    "X-Evoke-Session": "mine",
    "X-Conversation-Id": "theirs",
    "X-Request-Id": "golden-1",
    "Connection": "keep-alive, X-Hop",
    "X-Hop": "dropped",
    "TE": "trailers",
    "Cookie": "a=b",
}
