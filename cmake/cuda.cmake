# The CUDA backend, codec and attention: kernels for sm_80 (every 8.x), sm_90a and sm_120, and PTX
# for what follows. The CPU-only build never sees this. Each kernel's registers, shared memory and
# spills are checked as it is compiled.
set(KVTILE_CUDA OFF CACHE STRING "CUDA backend: ON, OFF, or AUTO (ON where nvcc is found)")
set_property(CACHE KVTILE_CUDA PROPERTY STRINGS ON OFF AUTO)
set(KVTILE_CUDA_ARCHITECTURES "80-real;90a-real;120-real;120-virtual" CACHE STRING
  "GPU architectures; 86-real and 89-real may be added")

set(KVTILE_WITH_CUDA OFF)
if(KVTILE_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES ${KVTILE_CUDA_ARCHITECTURES})
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(KVTILE_WITH_CUDA ON)
  elseif(NOT KVTILE_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "KVTILE_CUDA: got ON without nvcc, wanted nvcc 12.8 or later in PATH")
  endif()
endif()
if(NOT KVTILE_WITH_CUDA)
  return()
endif()

enable_language(CUDA)
# CMake 3.25 does not know that nvcc has a C++20 flag.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
find_package(CUDAToolkit 12.8 REQUIRED)
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)

file(GLOB KVTILE_CUDA_SOURCES CONFIGURE_DEPENDS
  src/codec/*.cu src/attention/cuda/*.cu src/attention/cuda/*/*.cu)
set(budgets ${CMAKE_CURRENT_SOURCE_DIR}/cmake/kernel_budgets.txt)
set(checker ${CMAKE_CURRENT_SOURCE_DIR}/cmake/check_resources.py)
set_source_files_properties(${KVTILE_CUDA_SOURCES} PROPERTIES OBJECT_DEPENDS "${budgets};${checker}")

add_library(kvtile_cuda_objects OBJECT ${KVTILE_CUDA_SOURCES})
set_target_properties(kvtile_cuda_objects PROPERTIES
  CUDA_COMPILER_LAUNCHER "${Python3_EXECUTABLE};${checker};--budgets;${budgets};--")
target_include_directories(kvtile_cuda_objects PRIVATE
  ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR}/include)
target_compile_definitions(kvtile_cuda_objects PRIVATE KVTILE_CUDA=1)
target_compile_options(kvtile_cuda_objects PRIVATE --expt-relaxed-constexpr
  -Xcompiler=-Wall,-Wextra,-ffp-contract=off
  $<$<BOOL:${KVTILE_WERROR}>:--Werror=all-warnings>)
