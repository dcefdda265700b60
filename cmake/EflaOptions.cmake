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

# CUDA is optional: it is on where nvcc is found, but for sanitizer builds.
include(CheckLanguage)
if(NOT DEFINED EFLA_CUDA AND NOT EFLA_SANITIZE)
  find_program(NVCC_PROGRAM nvcc PATHS /usr/local/cuda/bin)
  if(NVCC_PROGRAM AND NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${NVCC_PROGRAM})
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(EFLA_CUDA ON)
  endif()
endif()
option(EFLA_CUDA "Build the CUDA part (default: where nvcc is found)" OFF)
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
