# efla_kernel_report(target exceptions)
# A table of the registers, spills and shared memory of every kernel of a CUDA library, printed by the build (target
# efla_kernel_report) and kept in kernel_report.txt. Spills fail it, but for those in the file of exceptions.
function(efla_kernel_report target exceptions)
  set(scripts ${CMAKE_SOURCE_DIR}/cmake/kernel_report.py ${CMAKE_SOURCE_DIR}/cmake/ptxas_log.py)
  set_property(TARGET ${target} PROPERTY CUDA_COMPILER_LAUNCHER ${EFLA_PYTHON}
               ${CMAKE_SOURCE_DIR}/cmake/ptxas_log.py ${CMAKE_CUDA_COMPILER_LAUNCHER})
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
  set(report ${CMAKE_CURRENT_BINARY_DIR}/kernel_report.txt)
  add_custom_command(
    OUTPUT ${report}
    COMMAND ${EFLA_PYTHON} ${CMAKE_SOURCE_DIR}/cmake/kernel_report.py --exceptions ${exceptions}
            --output ${report} $<TARGET_OBJECTS:${target}>
    DEPENDS ${target} ${scripts} ${exceptions}
    COMMENT "Registers, spills and shared memory of the CUDA kernels"
    COMMAND_EXPAND_LISTS VERBATIM)
  add_custom_target(efla_kernel_report ALL DEPENDS ${report})
endfunction()
