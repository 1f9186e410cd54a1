# Address and undefined-behaviour sanitizers for what is ours and what it is woven into: the server,
# and the cache and context of libllama. Models and kernels have none: most of an hour on two
# cores. All of it is optimised less than usual, to be built sooner.
set(CMAKE_C_FLAGS_RELEASE "-O1 -DNDEBUG")
set(CMAKE_CXX_FLAGS_RELEASE "-O1 -DNDEBUG")
function(evoke_sanitize)
    set(sanitizers -fsanitize=address,undefined -fno-sanitize=vptr -fno-omit-frame-pointer)
    set(options ${sanitizers} -O1 -g1 -UNDEBUG)
    foreach(target server-context llama-server-impl llama-server)
        if(TARGET ${target})
            target_compile_options(${target} PRIVATE ${options})
        endif()
    endforeach()
    get_target_property(sources llama SOURCES)
    list(FILTER sources INCLUDE REGEX "llama-(kv-block|kv-cache|attn-capture|context)[.]cpp$")
    get_target_property(folder llama SOURCE_DIR)
    list(TRANSFORM sources PREPEND "${folder}/")
    set_source_files_properties(${sources} TARGET_DIRECTORY llama PROPERTIES
        COMPILE_OPTIONS "${options}" SKIP_UNITY_BUILD_INCLUSION ON)
    target_link_options(llama-server PRIVATE ${sanitizers})
endfunction()
cmake_language(DEFER CALL evoke_sanitize)
