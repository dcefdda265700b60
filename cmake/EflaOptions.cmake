# Flags that every target of the project shares.

# One position-independent mode everywhere lets all torch rooms share one precompiled header.
set(cxx $<COMPILE_LANGUAGE:CXX>)
add_compile_options($<${cxx}:-fPIC>)

if(EFLA_SANITIZE)
  add_compile_options("$<${cxx}:-fsanitize=${EFLA_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>")
  add_link_options(-fsanitize=${EFLA_SANITIZE})
endif()

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  # pch_defines,time_macros: what ccache needs to cache objects that use a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${CCACHE_PROGRAM})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<${cxx}:-fpch-preprocess>)
  endif()
endif()

# CUDA is optional: AUTO is on where an nvcc of at least version 13 is found, but for sanitizer
# builds. The answer is not cached: a toolkit that is installed later is found by the next configure.
set(EFLA_CUDA AUTO CACHE STRING "Build the CUDA part: ON, OFF or AUTO (where nvcc is found)")
if(EFLA_CUDA STREQUAL "AUTO")
  set(EFLA_CUDA OFF)
  set(NVCC_MINIMUM 13)
  unset(NVCC_PROGRAM CACHE)
  find_program(NVCC_PROGRAM nvcc PATHS /usr/local/cuda/bin)
  if(NVCC_PROGRAM AND NOT EFLA_SANITIZE)
    execute_process(COMMAND ${NVCC_PROGRAM} --version OUTPUT_VARIABLE nvcc_says ERROR_QUIET)
    string(REGEX MATCH "release ([0-9.]+)" nvcc_release "${nvcc_says}")
    set(nvcc_release "${CMAKE_MATCH_1}")
    if(nvcc_release VERSION_GREATER_EQUAL NVCC_MINIMUM)
      set(EFLA_CUDA ON)
      if(NOT CMAKE_CUDA_COMPILER)
        set(CMAKE_CUDA_COMPILER ${NVCC_PROGRAM})
      endif()
    else()
      message(WARNING "${NVCC_PROGRAM} is CUDA '${nvcc_release}', older than the ${NVCC_MINIMUM} that "
                      "is needed: building without the CUDA part")
    endif()
  endif()
endif()
if(EFLA_CUDA)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a)
  endif()
  if(CCACHE_PROGRAM)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
  endif()
  enable_language(CUDA)
  # CMake 3.25 does not know nvcc 13's language dialects.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  find_package(CUDAToolkit REQUIRED)
  add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fPIC>)
endif()
