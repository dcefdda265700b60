# Finds libtorch inside the installed Python package `torch` and defines Libtorch::Libtorch.
# Looks at ${EFLA_PYTHON} (default: .venv/bin/python of this checkout, else python3), or into the folder
# of the package that the environment variable EFLA_TORCH_DIR names.
# find_package(Torch) is not used: it drags in FindCUDA and wants targets that CUDA 13 no longer has.

if(NOT EFLA_PYTHON)
  if(EXISTS ${CMAKE_SOURCE_DIR}/.venv/bin/python)
    set(EFLA_PYTHON ${CMAKE_SOURCE_DIR}/.venv/bin/python)
  else()
    set(EFLA_PYTHON python3)
  endif()
endif()
if(DEFINED ENV{EFLA_TORCH_DIR})
  set(Libtorch_DIR_ $ENV{EFLA_TORCH_DIR})
else()
  execute_process(
    COMMAND ${EFLA_PYTHON} -c
            "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin))"
    OUTPUT_VARIABLE Libtorch_DIR_ OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(Libtorch_DIR_)
  file(STRINGS ${Libtorch_DIR_}/version.py Libtorch_VERSION REGEX "^__version__ = ")
  string(REGEX REPLACE "^[^']*'([^']+)'.*$" "\\1" Libtorch_VERSION "${Libtorch_VERSION}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  Libtorch REQUIRED_VARS Libtorch_DIR_ VERSION_VAR Libtorch_VERSION
  REASON_FAILURE_MESSAGE "no importable torch for ${EFLA_PYTHON}: run scripts/setup.sh first")

if(Libtorch_FOUND AND NOT TARGET Libtorch::Libtorch)
  set(Libtorch_LIB_DIR ${Libtorch_DIR_}/lib)
  add_library(Libtorch::Libtorch INTERFACE IMPORTED)
  target_include_directories(
    Libtorch::Libtorch SYSTEM INTERFACE ${Libtorch_DIR_}/include
                                        ${Libtorch_DIR_}/include/torch/csrc/api/include)
  # --no-as-needed: libraries that only register operators from static initialisers must stay linked.
  # libtorch.so pulls in libtorch_cuda, so it is linked with the CUDA part only: without it every
  # program starts in half the time.
  target_link_libraries(
    Libtorch::Libtorch
    INTERFACE "-Wl,--no-as-needed" ${Libtorch_LIB_DIR}/libc10.so ${Libtorch_LIB_DIR}/libtorch_cpu.so
              $<$<BOOL:${EFLA_CUDA}>:${Libtorch_LIB_DIR}/libtorch.so> "-Wl,--as-needed")
  # The wheel's own dependencies (CUDA libraries) are found by its rpath or the loader, not by ours.
  target_link_options(Libtorch::Libtorch INTERFACE "-Wl,--allow-shlib-undefined"
                      "-Wl,-rpath,${Libtorch_LIB_DIR}")
endif()
