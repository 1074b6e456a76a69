// Compares our declaration of a library's function with that of the library's header, while it is compiled.
#pragma once

#include <type_traits>

namespace declarations {

template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
constexpr bool same_calls(OurResult (*)(Ours...), TheirResult (*)(Theirs...));

// Whether one type can be passed as the other: pointers point to the same, and perhaps promise to leave it as it is;
// numbers and enumerations have one size.
template <typename Ours, typename Theirs>
constexpr bool fits() {
  if constexpr (std::is_const_v<Ours> && !std::is_const_v<Theirs>) {
    return false;
  } else if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    if constexpr (std::is_function_v<std::remove_pointer_t<Ours>> && std::is_function_v<std::remove_pointer_t<Theirs>>)
      return same_calls(Ours(), Theirs());
    else return fits<std::remove_pointer_t<Ours>, std::remove_pointer_t<Theirs>>();
  } else if constexpr (std::is_class_v<Ours> || std::is_class_v<Theirs>) {
    return std::is_class_v<Ours> && std::is_class_v<Theirs>;  // handles' are incomplete
  } else if constexpr (std::is_void_v<Ours> || std::is_void_v<Theirs>) {
    return std::is_void_v<Ours> && std::is_void_v<Theirs>;
  } else {
    constexpr bool numbers =
        (std::is_integral_v<Ours> || std::is_enum_v<Ours>) && (std::is_integral_v<Theirs> || std::is_enum_v<Theirs>);
    return numbers && sizeof(Ours) == sizeof(Theirs);
  }
}

template <typename OurResult, typename... Ours, typename TheirResult, typename... Theirs>
constexpr bool same_calls(OurResult (*)(Ours...), TheirResult (*)(Theirs...)) {
  if constexpr (sizeof...(Ours) != sizeof...(Theirs)) return false;
  else return fits<OurResult, TheirResult>() && (fits<Ours, Theirs>() && ...);
}

}  // namespace declarations
