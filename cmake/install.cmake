# Install rules. Two targets are exported: kvtile::kvtile, the shared library whose stable interface
# is the C ABI, and kvtile::static, the archive that C++ callers link (C++ symbols are not part of
# the shared library's interface). pkg-config's kvtile.pc describes the shared one.
include(CMakePackageConfigHelpers)

set(KVTILE_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/kvtile)
set_target_properties(kvtile_static PROPERTIES EXPORT_NAME static)
install(TARGETS kvtile kvtile_static EXPORT kvtile_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/kvtile DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT kvtile_targets NAMESPACE kvtile:: DESTINATION ${KVTILE_CMAKE_DIR})

configure_package_config_file(cmake/kvtile-config.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/kvtile-config.cmake INSTALL_DESTINATION ${KVTILE_CMAKE_DIR})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/kvtile-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kvtile-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/kvtile-config-version.cmake DESTINATION ${KVTILE_CMAKE_DIR})

# The prefix is found from the file's own place, so that an installed tree can be moved.
file(RELATIVE_PATH KVTILE_PC_TO_PREFIX
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/kvtile.pc.in ${CMAKE_CURRENT_BINARY_DIR}/kvtile.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/kvtile.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(FILES LICENSE README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})

# What the Python package carries beside its sources: the shared library, under its plain name since
# a wheel holds no links, and the command.
install(FILES $<TARGET_FILE:kvtile> DESTINATION kvtile RENAME libkvtile.so
  COMPONENT python EXCLUDE_FROM_ALL)
if(TARGET kvtile_cli)
  install(PROGRAMS $<TARGET_FILE:kvtile_cli> DESTINATION kvtile/bin
    COMPONENT python EXCLUDE_FROM_ALL)
endif()
