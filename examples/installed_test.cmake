# Installs BUILD_DIR below WORK_DIR, then builds and runs EXAMPLE_DIR against that installation
# twice: through find_package(kvtile) and through pkg-config. The prefix is moved between install
# and use, so a path burnt in at install time fails the test.
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    string(JOIN " " line ${ARGV})
    message(FATAL_ERROR "${line}\nexit ${result}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/staged)
set(prefix ${WORK_DIR}/moved)
file(RENAME ${WORK_DIR}/staged ${prefix})

run(${CMAKE_COMMAND} -S ${EXAMPLE_DIR} -B ${WORK_DIR}/cmake -G Ninja -DCMAKE_C_COMPILER=${CC}
  -DCMAKE_PREFIX_PATH=${prefix})
run(${CMAKE_COMMAND} --build ${WORK_DIR}/cmake)
run(${WORK_DIR}/cmake/attend)
message("find_package: ${output}")

set(ENV{PKG_CONFIG_PATH} ${prefix}/${LIBDIR}/pkgconfig)
run(pkg-config --cflags --libs kvtile)
separate_arguments(flags UNIX_COMMAND "${output}")
run(${CC} -std=c11 -Wall -Wextra -Werror ${EXAMPLE_DIR}/attend.c -o ${WORK_DIR}/attend ${flags} -lm
  -Wl,-rpath,${prefix}/${LIBDIR})
run(${WORK_DIR}/attend)
message("pkg-config: ${output}")
