# Fails unless README.md holds, word for word, the table GENERATOR prints.
execute_process(COMMAND ${GENERATOR} OUTPUT_VARIABLE expected COMMAND_ERROR_IS_FATAL ANY)
file(READ ${README} readme)
string(FIND "${readme}" "${expected}" position)
if(position EQUAL -1)
  message(FATAL_ERROR "README.md: the support matrix differs from what the library answers:\n${expected}")
endif()
