// One record of each evaluation set as a sample: the prompts, word for word. Each function takes
// every layout in which its set is found. Throws Error naming file, line and what is wrong.
#pragma once

#include "efla/eval/tasks.h"

namespace efla {

EvalSample read_lambada(const TaskRecord& record);
EvalSample read_piqa(const TaskRecord& record);
EvalSample read_hellaswag(const TaskRecord& record);
EvalSample read_winogrande(const TaskRecord& record);
EvalSample read_arc(const TaskRecord& record);
EvalSample read_boolq(const TaskRecord& record);
EvalSample read_openbookqa(const TaskRecord& record);
EvalSample read_sciq(const TaskRecord& record);
EvalSample read_copa(const TaskRecord& record);
EvalSample read_winograd(const TaskRecord& record);

/// One article as a sample of the task wikitext.
EvalSample wikitext_sample(const std::string& page, const std::string& origin);

/// HellaSwag's clean-up of a text: its WikiHow part holds marks like "[title]".
std::string hellaswag_text(std::string_view text);

}  // namespace efla
