# One compiled library per package: <import name>/_C.so and, beside it, build_info.json.
#
# The library sees torch through the stable ABI alone and has no Python symbols, so one binary serves every torch from
# the target version on and every Python. The actor and the rollout then run the same SASS.
#
# Include this file at the top level of a CMakeLists.txt, then call bi_add_extension(). Environment:
#   BI_BUILD_CUDA   auto (default): compile if nvcc is there, else a wheel with the references only
#                   on: no nvcc is an error;  off: handled in pyproject.toml, CMake does not run
#   BI_CUDA_ARCHS   subset of "90a;100f" (default: both), to shorten development builds

include_guard(GLOBAL)
include(CheckLanguage)

set(BI_TORCH_TARGET 2.10)
set(BI_TORCH_TARGET_HEX 0x020a000000000000)
set(BI_INCLUDE_DIRS "${CMAKE_CURRENT_LIST_DIR}/../include" "${CMAKE_CURRENT_LIST_DIR}/../csrc/include")

set(BI_BUILD_CUDA "$ENV{BI_BUILD_CUDA}")
if(NOT BI_BUILD_CUDA)
    set(BI_BUILD_CUDA auto)
endif()
if(NOT BI_BUILD_CUDA MATCHES "^(auto|on)$")
    message(FATAL_ERROR "BI_BUILD_CUDA: expected auto, on or off, got '${BI_BUILD_CUDA}'.")
endif()

set(BI_CUDA_ARCHS "$ENV{BI_CUDA_ARCHS}")
if(NOT BI_CUDA_ARCHS)
    set(BI_CUDA_ARCHS 90a 100f)
endif()
foreach(arch IN LISTS BI_CUDA_ARCHS)
    if(NOT arch MATCHES "^(90a|100f)$")
        message(FATAL_ERROR "BI_CUDA_ARCHS: expected a subset of '90a;100f', got '${arch}'. No other arithmetic is specified.")
    endif()
endforeach()

# Raw -gencode flags: CMake 3.25 does not know 100f, and nothing may add PTX, which would run, compiled by the driver,
# on a GPU that nobody validated.
set(CMAKE_CUDA_ARCHITECTURES OFF)
check_language(CUDA)
if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.9)
        message(FATAL_ERROR "nvcc: expected 12.9 or newer (sm_100f), found ${CMAKE_CUDA_COMPILER_VERSION}. "
                            "Install a newer CUDA toolkit, or set BI_BUILD_CUDA=off.")
    endif()
elseif(BI_BUILD_CUDA STREQUAL on)
    message(FATAL_ERROR "BI_BUILD_CUDA=on: no working nvcc. Put the CUDA toolkit's bin folder on PATH (a host C++ compiler "
                        "is needed too), or set BI_BUILD_CUDA=off for a wheel with the references only.")
else()
    message(STATUS "No nvcc: building without the CUDA library. CPU tensors work, CUDA tensors will be refused.")
endif()

find_package(Python REQUIRED COMPONENTS Interpreter)

# Where the building Python keeps torch, and its version, without importing it.
function(_bi_find_torch out_dir)
    set(code "import importlib.metadata as m, importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] + ';' + m.version('torch'))")
    execute_process(COMMAND "${Python_EXECUTABLE}" -c "${code}"
                    RESULT_VARIABLE failed OUTPUT_VARIABLE found ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(failed)
        message(FATAL_ERROR "torch: ${Python_EXECUTABLE} has none, and the CUDA library needs its headers. Install torch >= "
                            "${BI_TORCH_TARGET} there and build with --no-build-isolation, or set BI_BUILD_CUDA=off.")
    endif()
    list(GET found 0 dir)
    list(GET found 1 version)
    if(version VERSION_LESS BI_TORCH_TARGET)
        message(FATAL_ERROR "torch: expected ${BI_TORCH_TARGET} or newer, found ${version}. Upgrade torch.")
    endif()
    set(${out_dir} "${dir}" PARENT_SCOPE)
endfunction()

# bi_add_extension(<distribution> <version>): compile csrc/*.cu of the calling package into _C.so.
function(bi_add_extension distribution version)
    if(NOT CMAKE_CUDA_COMPILER)
        return()
    endif()
    file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/*.cu")
    if(NOT sources)
        message(FATAL_ERROR "${distribution}: csrc/ holds no .cu file. Set wheel.cmake = false in its pyproject.toml.")
    endif()
    _bi_find_torch(torch)

    set(gencode "")
    foreach(arch IN LISTS BI_CUDA_ARCHS)
        list(APPEND gencode "-gencode=arch=compute_${arch},code=sm_${arch}")
    endforeach()
    # No fast math, and no contraction: a fused multiply-add happens where the source says so and nowhere else.
    # -std here and not as CUDA_STANDARD, because CMake 3.25.1 does not know that nvcc has C++20.
    set(flags -std=c++20 ${gencode} -fmad=false -Xcompiler=-ffp-contract=off)

    add_library(_C MODULE ${sources})
    target_include_directories(_C PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/csrc" ${BI_INCLUDE_DIRS})
    target_include_directories(_C SYSTEM PRIVATE "${torch}/include")
    target_compile_definitions(_C PRIVATE TORCH_STABLE_ONLY TORCH_TARGET_VERSION=${BI_TORCH_TARGET_HEX} USE_CUDA)
    target_compile_options(_C PRIVATE ${flags})
    target_link_directories(_C PRIVATE "${torch}/lib")
    # Without --no-as-needed the linker drops both libraries, and loading fails on aoti_torch_dtype_float32.
    target_link_libraries(_C PRIVATE -Wl,--no-as-needed -ltorch -ltorch_cpu -Wl,--as-needed -Wl,--exclude-libs,ALL)
    set_target_properties(_C PROPERTIES
        PREFIX "" SUFFIX ".so" SKIP_BUILD_RPATH ON
        CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)

    _bi_write_build_info("${distribution}" "${version}" "${BI_CUDA_ARCHS}" "${flags}")
    install(TARGETS _C LIBRARY DESTINATION .)
    install(FILES "${CMAKE_CURRENT_BINARY_DIR}/build_info.json" DESTINATION .)
endfunction()

# The host compiler that nvcc calls, by its own macros: CMake 3.25 does not record it.
function(_bi_host_compiler out)
    set(probe "${CMAKE_CURRENT_BINARY_DIR}/host_compiler.cu")
    file(WRITE "${probe}" "bi-host-compiler __GNUC__ __GNUC_MINOR__ __GNUC_PATCHLEVEL__ __VERSION__\n")
    execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" -E "${probe}" OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
    if(text MATCHES "bi-host-compiler [^\n]*\"([^\"]*[Cc]lang[^\"]*)\"")
        set(${out} "${CMAKE_MATCH_1}" PARENT_SCOPE)
    elseif(text MATCHES "bi-host-compiler ([0-9]+) ([0-9]+) ([0-9]+)")
        set(${out} "GNU ${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}" PARENT_SCOPE)
    else()
        message(FATAL_ERROR "The host compiler of nvcc is neither GNU nor Clang; build_info.json could not name it.")
    endif()
endfunction()

function(_bi_json_array out)
    set(json "[]")
    set(i 0)
    foreach(item IN LISTS ARGN)
        string(JSON json SET "${json}" ${i} "\"${item}\"")
        math(EXPR i "${i} + 1")
    endforeach()
    set(${out} "${json}" PARENT_SCOPE)
endfunction()

function(_bi_write_build_info distribution version archs flags)
    file(GLOB_RECURSE files "${CMAKE_CURRENT_SOURCE_DIR}/csrc/*.cu" "${CMAKE_CURRENT_SOURCE_DIR}/csrc/*.cuh"
         "${CMAKE_CURRENT_SOURCE_DIR}/csrc/*.h")
    foreach(dir IN LISTS BI_INCLUDE_DIRS)
        file(GLOB_RECURSE headers "${dir}/*.cuh" "${dir}/*.h")
        list(APPEND files ${headers})
    endforeach()
    list(REMOVE_DUPLICATES files)
    # Content only, sorted: the hash does not depend on where the tree lies.
    set(digests "")
    foreach(file IN LISTS files)
        file(SHA256 "${file}" digest)
        list(APPEND digests "${digest}")
    endforeach()
    list(REMOVE_DUPLICATES digests)
    list(SORT digests)
    string(SHA256 sources "${digests}")

    _bi_host_compiler(compiler)
    string(TOUPPER "${CMAKE_BUILD_TYPE}" type)
    separate_arguments(base UNIX_COMMAND "${CMAKE_CUDA_FLAGS} ${CMAKE_CUDA_FLAGS_${type}}")
    _bi_json_array(json_archs ${archs})
    _bi_json_array(json_flags ${base} ${flags})
    set(info "{}")
    string(JSON info SET "${info}" package "\"${distribution}\"")
    string(JSON info SET "${info}" version "\"${version}\"")
    string(JSON info SET "${info}" torch_target "\"${BI_TORCH_TARGET}\"")
    string(JSON info SET "${info}" archs "${json_archs}")
    string(JSON info SET "${info}" nvcc "\"${CMAKE_CUDA_COMPILER_VERSION}\"")
    string(JSON info SET "${info}" flags "${json_flags}")
    string(JSON info SET "${info}" sources_sha256 "\"${sources}\"")
    string(JSON info SET "${info}" compiler "\"${compiler}\"")
    file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/build_info.json" "${info}\n")
endfunction()
