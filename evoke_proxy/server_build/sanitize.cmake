# Sanitizers for what is ours and what it is woven into. Kernels and models have none: most of an hour
# on two cores. All of it is optimised less than usual, to be built sooner.
#
# EVOKE_SANITIZER=address (default): addresses and undefined behaviour in the server and in the cache
# and context of libllama. EVOKE_SANITIZER=thread: data races; it also takes everything else that
# threads share objects with (HTTP, logging, all of libllama but its models), as code without the
# sanitizer hides what orders two accesses.
set(CMAKE_C_FLAGS_RELEASE "-O1 -DNDEBUG")
set(CMAKE_CXX_FLAGS_RELEASE "-O1 -DNDEBUG")
function(evoke_sanitize)
    set(targets server-context llama-server-impl llama-server)
    set(files "llama-(kv-block|kv-cache|attn-capture|context)[.]cpp$")
    set(sanitizers -fsanitize=address,undefined -fno-sanitize=vptr -fno-omit-frame-pointer)
    if(EVOKE_SANITIZER STREQUAL "thread")
        list(APPEND targets cpp-httplib llama-common)
        set(files "(^|/)(llama|unicode)[^/]*[.]cpp$")
        set(sanitizers -fsanitize=thread -fno-omit-frame-pointer)
    endif()
    set(options ${sanitizers} -O1 -g1 -UNDEBUG)
    foreach(target ${targets})
        if(TARGET ${target})
            target_compile_options(${target} PRIVATE ${options})
        endif()
    endforeach()
    get_target_property(sources llama SOURCES)
    list(FILTER sources INCLUDE REGEX "${files}")
    list(FILTER sources EXCLUDE REGEX "^models/")
    get_target_property(folder llama SOURCE_DIR)
    list(TRANSFORM sources PREPEND "${folder}/")
    set_source_files_properties(${sources} TARGET_DIRECTORY llama PROPERTIES
        COMPILE_OPTIONS "${options}" SKIP_UNITY_BUILD_INCLUSION ON)
    target_link_options(llama-server PRIVATE ${sanitizers})
endfunction()
cmake_language(DEFER CALL evoke_sanitize)
