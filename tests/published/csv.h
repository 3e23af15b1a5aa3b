// Comma-separated tables with a header, fields in double quotes where they have commas.
#pragma once

#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace echelon::published {

using CsvRow = std::map<std::string, std::string>;

inline std::vector<std::string> csv_fields(std::ifstream& in) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (char c; in.get(c);) {
    if (c == '"')
      quoted = !quoted;
    else if (c == ',' && !quoted)
      fields.emplace_back();
    else if (c == '\n' && !quoted)
      return fields;
    else if (c != '\r')
      fields.back() += c;
  }
  return fields;
}

inline std::vector<CsvRow> read_csv(const std::filesystem::path& path) {
  std::ifstream in(path);
  if (!in) throw std::runtime_error(path.string() + " cannot be read");
  const std::vector<std::string> header = csv_fields(in);
  std::vector<CsvRow> rows;
  while (in.peek() != EOF) {
    const std::vector<std::string> fields = csv_fields(in);
    if (fields.size() < 2) continue;
    CsvRow& row = rows.emplace_back();
    for (std::size_t i = 0; i < header.size() && i < fields.size(); ++i) row[header[i]] = fields[i];
  }
  return rows;
}

// 0 of an empty field or one that is no number ("n/a").
inline double number(const CsvRow& row, const std::string& column) {
  const std::string& text = row.at(column);
  double value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}
inline int whole(const CsvRow& row, const std::string& column) {
  return static_cast<int>(number(row, column));
}
inline bool yes(const CsvRow& row, const std::string& column) {
  const std::string& text = row.at(column);
  return text == "True" || text == "true" || text == "1";
}

}  // namespace echelon::published
