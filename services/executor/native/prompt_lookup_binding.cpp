#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <string>

#include "services/executor/native/bindings.h"
#include "services/executor/native/prompt_lookup.h"
#include "services/executor/native/refuse.h"

namespace nb = nanobind;

namespace quire {
namespace {

using Measured = std::vector<std::pair<int, double>>;
using Chances = std::vector<std::vector<double>>;

std::span<const int32_t> span(const Int32s& ids) { return {ids.data(), ids.size()}; }

Verdict verdict_of(int number) {
  if (number < 0 || number >= kVerdicts) refuse("verdict must be in 0..2");
  return Verdict(number);
}

std::vector<std::vector<int32_t>> propose(PromptLookup& self, const std::vector<LookupText*>& texts,
                                          const std::vector<Int32s>& token_ids, const std::vector<int>& mosts,
                                          int tokens) {
  if (texts.size() != token_ids.size() || texts.size() != mosts.size()) refuse("the lists differ in length");
  std::vector<LookupRequest> requests;
  for (size_t at = 0; at < texts.size(); at++) requests.push_back({texts[at], span(token_ids[at]), mosts[at]});
  return self.propose(requests, tokens);
}

void bind_parts(nb::module_& module) {
  nb::class_<SuffixAutomaton>(module, "SuffixAutomaton", "Where the end of a growing text occurred before.")
      .def(nb::init<>())
      .def(
          "add", [](SuffixAutomaton& self, const std::vector<int32_t>& token_ids) { self.add(token_ids); },
          nb::arg("token_ids"), "Appends tokens, each at least 0.")
      .def(
          "match",
          [](SuffixAutomaton& self) {
            const SuffixAutomaton::Match found = self.match();
            return std::tuple(found.length, found.end, found.state);
          },
          "The longest suffix that occurred before: its length, where it ended (exclusive), as late as is known, and a "
          "number that it always has. Length 0 where even the last token is new.")
      .def_prop_ro("size", &SuffixAutomaton::size, "Tokens so far.")
      .def_prop_ro("state_count", &SuffixAutomaton::state_count, "At most two a token, and one.");
  nb::class_<DraftConfidence>(module, "DraftConfidence", "How likely copied drafts are to be accepted.")
      .def(nb::init<int>(), nb::arg("places"))
      .def(
          "chances",
          [](const DraftConfidence& self, int match, int verdict) {
            std::vector<double> found;
            self.chances(std::max(match, 1), verdict_of(verdict), self.places(), found);
            return found;
          },
          nb::arg("match"), nb::arg("verdict"),
          "For each draft behind a match of so many tokens, which was not tried yet (0), wrong (1) or right (2) "
          "before: "
          "how likely it and all before it are accepted.")
      .def(
          "saw",
          [](DraftConfidence& self, int match, int verdict, int compared, int accepted) {
            self.saw(std::max(match, 1), verdict_of(verdict), compared, accepted);
          },
          nb::arg("match"), nb::arg("verdict"), nb::arg("compared"), nb::arg("accepted"),
          "Of `compared` drafts behind a match, the first `accepted` were what came, and the next, if any, was not.");
  nb::class_<StepCosts>(module, "StepCosts", "How much longer a step takes with drafts.")
      .def(
          "__init__", [](StepCosts* self, const Measured& measured) { new (self) StepCosts(measured); },
          nb::arg("measured"), "Pairs of tokens and seconds, ascending by tokens; at least two.")
      .def("ratio", &StepCosts::ratio, nb::arg("plain"), nb::arg("tokens"),
           "How many times as long as a step of `plain` tokens one takes that has drafts beside them, `tokens` in all.")
      .def("observe", &StepCosts::observe, nb::arg("plain"), nb::arg("tokens"), nb::arg("seconds"),
           "Takes in what the next step of decodes took.");
  module.def(
      "best_draft_lengths",
      [](const Chances& chances, int tokens, const StepCosts& costs, double margin, double least_pace) {
        return best_lengths(chances, tokens, costs, {margin, least_pace});
      },
      nb::arg("chances"), nb::arg("tokens"), nb::arg("costs"), nb::kw_only(), nb::arg("margin"), nb::arg("least_pace"),
      "How many drafts of each sequence to verify, so that a step of `tokens` without them gives the most tokens a "
      "second.");
}

}  // namespace

void bind_prompt_lookup(nb::module_& module) {
  bind_parts(module);
  nb::class_<LookupText>(module, "LookupText", "What prompt lookup keeps with a sequence.").def(nb::init<>());
  nb::class_<PromptLookup>(module, "PromptLookup", "What followed when a text last came to the same end.")
      .def(
          "__init__",
          [](PromptLookup* self, const Measured& costs, int most_drafts, double margin, double least_pace,
             int most_taken, int tried_every, double tried_chance) {
            const LookupRules rules = {{margin, least_pace}, most_taken, tried_every, tried_chance};
            new (self) PromptLookup(most_drafts, rules, StepCosts(costs));
          },
          nb::arg("costs"), nb::kw_only(), nb::arg("most_drafts"), nb::arg("margin"), nb::arg("least_pace"),
          nb::arg("most_taken"), nb::arg("tried_every"), nb::arg("tried_chance"))
      .def("propose", &propose, nb::arg("texts"), nb::arg("token_ids"), nb::arg("mosts"), nb::arg("tokens"),
           "Drafts of each sequence, perhaps none: of texts, their tokens [n] int32 so far, and the most drafts of "
           "each; "
           "`tokens` the step has without them.")
      .def(
          "computed",
          [](PromptLookup& self, int plain, int tokens, double seconds) {
            self.costs().observe(plain, tokens, seconds);
          },
          nb::arg("plain"), nb::arg("tokens"), nb::arg("seconds"),
          "Takes in what the next step of decodes took, with so many tokens, `plain` of them not drafts.");
}

}  // namespace quire
