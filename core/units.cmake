# Compiles the sources of a target in units that hold the sources of one floor, a folder with its rooms (CMake's unity
# builds), up to a number of bytes that a compiler needs a few seconds for: headers are read once for many sources, and
# all processors are busy.
set(bytes_of_a_unit 30000)

function(compile_together target)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    get_filename_component(path ${source} ABSOLUTE)
    file(SIZE ${path} bytes)
    file(RELATIVE_PATH inside ${CMAKE_CURRENT_SOURCE_DIR} ${path})
    string(REGEX MATCH "(core/)?([a-z_]+)/" found ${inside})
    set(floor "${CMAKE_MATCH_2}")  # empty for sources beside the list of sources
    math(EXPR filled "${filled} + ${bytes}")
    if(NOT floor STREQUAL previous)
      set(previous "${floor}")
      set(unit 1)
      set(filled ${bytes})
    elseif(filled GREATER bytes_of_a_unit)
      math(EXPR unit "${unit} + 1")
      set(filled ${bytes})
    endif()
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${floor}_${unit})
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()
