# Flags that every target of the project shares.

# One position-independent mode everywhere lets all torch rooms share one precompiled header.
add_compile_options(-fPIC)

if(EFLA_SANITIZE)
  add_compile_options(-fsanitize=${EFLA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${EFLA_SANITIZE})
endif()

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  # pch_defines,time_macros: what ccache needs to cache objects that use a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${CCACHE_PROGRAM})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-fpch-preprocess)
  endif()
endif()

# CUDA is optional: it is on where nvcc is found.
include(CheckLanguage)
option(EFLA_CUDA "Build the CUDA part" OFF)
