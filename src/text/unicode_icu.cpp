#include <unicode/bytestream.h>
#include <unicode/casemap.h>
#include <unicode/normalizer2.h>
#include <unicode/stringpiece.h>
#include <unicode/ubrk.h>
#include <unicode/uchar.h>
#include <unicode/utext.h>
#include <unicode/utf8.h>

#include <memory>

#include "base/error.h"
#include "text/unicode.h"

namespace echelon {
namespace {

constexpr std::string_view replacement = "\xef\xbf\xbd";

void expect(UErrorCode error) {
  if (U_FAILURE(error)) fail("ICU: {}", u_errorName(error));
}

bool all_ascii(std::string_view text) {
  for (const char c : text)
    if (static_cast<unsigned char>(c) >= 0x80) return false;
  return true;
}

}  // namespace

bool is_whole_utf8(std::string_view text) {
  const auto size = static_cast<std::int64_t>(text.size());
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(text.data());
  for (std::int64_t i = 0; i < size;) {
    UChar32 character;
    U8_NEXT(bytes, i, size, character);
    if (character < 0) return false;
  }
  return true;
}

std::string replace_broken(std::string_view text) {
  std::string whole;
  whole.reserve(text.size());
  const auto size = static_cast<std::int64_t>(text.size());
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(text.data());
  for (std::int64_t i = 0; i < size;) {
    const std::int64_t begin = i;
    UChar32 character;
    U8_NEXT(bytes, i, size, character);
    whole += character < 0
                 ? replacement
                 : text.substr(static_cast<std::size_t>(begin), static_cast<std::size_t>(i - begin));
  }
  return whole;
}

char32_t next_character(std::string_view text, std::size_t& at) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(text.data());
  UChar32 character;
  U8_NEXT(bytes, at, text.size(), character);
  return character < 0 ? U'\ufffd' : static_cast<char32_t>(character);
}

void append_character(std::string& text, char32_t character) {
  std::uint8_t bytes[4];
  int length = 0;
  U8_APPEND_UNSAFE(bytes, length, static_cast<std::uint32_t>(character));
  text.append(reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(length));
}

std::vector<char32_t> characters_of(std::string_view text) {
  std::vector<char32_t> characters;
  for (std::size_t i = 0; i < text.size();) characters.push_back(next_character(text, i));
  return characters;
}

std::string normalized(std::string_view text, NormalForm form) {
  if (all_ascii(text)) return std::string(text);
  UErrorCode error = U_ZERO_ERROR;
  const icu::Normalizer2* normalizer = form == NormalForm::nfc    ? icu::Normalizer2::getNFCInstance(error)
                                       : form == NormalForm::nfd  ? icu::Normalizer2::getNFDInstance(error)
                                       : form == NormalForm::nfkc ? icu::Normalizer2::getNFKCInstance(error)
                                                                  : icu::Normalizer2::getNFKDInstance(error);
  expect(error);
  std::string result;
  icu::StringByteSink<std::string> sink(&result, static_cast<std::int32_t>(text.size()));
  normalizer->normalizeUTF8(0, icu::StringPiece(text.data(), static_cast<std::int32_t>(text.size())), sink,
                            nullptr, error);
  expect(error);
  return result;
}

std::string in_case(std::string_view text, LetterCase letters) {
  UErrorCode error = U_ZERO_ERROR;
  std::string out;
  icu::StringByteSink<std::string> sink(&out);
  const icu::StringPiece piece(text.data(), static_cast<std::int32_t>(text.size()));
  if (letters == LetterCase::lower)
    icu::CaseMap::utf8ToLower("", 0, piece, sink, nullptr, error);
  else if (letters == LetterCase::upper)
    icu::CaseMap::utf8ToUpper("", 0, piece, sink, nullptr, error);
  else
    icu::CaseMap::utf8ToTitle("", U_TITLECASE_WHOLE_STRING | U_TITLECASE_NO_BREAK_ADJUSTMENT, nullptr, piece,
                              sink, nullptr, error);
  expect(error);
  return out;
}

bool is_cased(std::string_view character) {
  std::size_t at = 0;
  return u_hasBinaryProperty(static_cast<UChar32>(next_character(character, at)), UCHAR_CASED) != 0;
}

bool is_printable(std::string_view character) {
  if (character == " ") return true;
  std::size_t at = 0;
  constexpr std::uint32_t hidden = U_GC_CC_MASK | U_GC_CF_MASK | U_GC_CS_MASK | U_GC_CO_MASK | U_GC_CN_MASK |
                                   U_GC_ZL_MASK | U_GC_ZP_MASK | U_GC_ZS_MASK;
  return (U_GET_GC_MASK(static_cast<UChar32>(next_character(character, at))) & hidden) == 0;
}

std::string lower_case(std::string_view text) {
  std::string lower;
  lower.reserve(text.size());
  for (std::size_t i = 0; i < text.size();) {
    const char32_t character = next_character(text, i);
    append_character(lower, static_cast<char32_t>(u_tolower(static_cast<UChar32>(character))));
    if (character == U'\u0130') append_character(lower, U'\u0307');  // the one that becomes two
  }
  return lower;
}

bool is_space(char32_t c) { return u_isUWhiteSpace(static_cast<UChar32>(c)) != 0; }
bool is_number(char32_t c) { return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_N_MASK) != 0; }
bool is_punctuation(char32_t c) { return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_P_MASK) != 0; }
bool is_mark(char32_t c) { return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_M_MASK) != 0; }
bool is_nonspacing_mark(char32_t c) { return u_charType(static_cast<UChar32>(c)) == U_NON_SPACING_MARK; }
bool is_other(char32_t c) {
  return (U_GET_GC_MASK(static_cast<UChar32>(c)) & U_GC_C_MASK & ~U_GC_CN_MASK) != 0;
}
bool is_word_character(char32_t c) {
  constexpr std::uint32_t word = U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK;
  return u_isUAlphabetic(static_cast<UChar32>(c)) != 0 ||
         (U_GET_GC_MASK(static_cast<UChar32>(c)) & word) != 0 ||
         u_hasBinaryProperty(static_cast<UChar32>(c), UCHAR_JOIN_CONTROL) != 0;
}

bool is_script(const std::string& name) {
  return u_getPropertyValueEnum(UCHAR_SCRIPT, name.c_str()) != UCHAR_INVALID_CODE;
}

std::string short_category(const std::string& name) {
  const std::int32_t value = u_getPropertyValueEnum(UCHAR_GENERAL_CATEGORY_MASK, name.c_str());
  const char* const found =
      value == UCHAR_INVALID_CODE
          ? nullptr
          : u_getPropertyValueName(UCHAR_GENERAL_CATEGORY_MASK, value, U_SHORT_PROPERTY_NAME);
  return found == nullptr ? name : found;
}

std::vector<std::size_t> grapheme_ends(std::string_view text) {
  UErrorCode error = U_ZERO_ERROR;
  const std::unique_ptr<UText, decltype(&utext_close)> opened(
      utext_openUTF8(nullptr, text.data(), static_cast<std::int64_t>(text.size()), &error), utext_close);
  expect(error);
  const std::unique_ptr<UBreakIterator, decltype(&ubrk_close)> breaks(
      ubrk_open(UBRK_CHARACTER, "", nullptr, 0, &error), ubrk_close);
  expect(error);
  ubrk_setUText(breaks.get(), opened.get(), &error);
  expect(error);
  std::vector<std::size_t> ends;
  for (std::int32_t at = ubrk_next(breaks.get()); at != UBRK_DONE; at = ubrk_next(breaks.get()))
    ends.push_back(static_cast<std::size_t>(at));
  return ends;
}

}  // namespace echelon
