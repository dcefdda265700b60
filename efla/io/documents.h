// Text files as documents.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace efla {

enum class DocumentFormat {
  kFile,      ///< one file is one document
  kFormFeed,  ///< documents are separated by lines that hold only a form feed (^L)
  kJsonLines  ///< one JSON object a line, the document under "text"
};

/// "file", "formfeed" or "jsonl"; UsageError for anything else.
DocumentFormat parse_document_format(const std::string& name);

struct Document {
  std::string text;
  std::string origin;  ///< "PATH" or "PATH:LINE", for messages
};

/// Calls `use` for each document in the order of `paths`; files that end in .gz or .xz are
/// decompressed. JSON lines are read one at a time; the other formats hold one file in memory. With
/// `require_utf8` the text is checked. Documents of no characters are skipped. Errors: a missing,
/// empty or damaged file, invalid UTF-8 (line and byte offset), a JSON line without a string
/// "text".
void for_each_document(const std::vector<std::string>& paths, DocumentFormat format,
                       bool require_utf8, const std::function<void(const Document&)>& use);

/// The whole file, decompressed when its name ends in .gz or .xz. Errors as above.
std::string read_text_file(const std::string& path);

}  // namespace efla
