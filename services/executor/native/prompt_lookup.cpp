#include "services/executor/native/prompt_lookup.h"

#include <algorithm>

#include "services/executor/native/refuse.h"

namespace quire {

void LookupText::learn(std::span<const int32_t> token_ids, DraftConfidence& confidence) {
  if (!found()) return;
  const int compared = std::min(int(token_ids.size()) - size_, confidence.places());
  // As long as all was right, what followed the match is what came, also where the text repeats itself.
  int accepted = 0;
  while (accepted < compared && token_ids[size_ + accepted] == token_ids[match_.end + accepted]) accepted++;
  if (compared > 0) {
    confidence.saw(match_.length, verdict_, compared, accepted);
    if (size_t(match_.state) >= verdicts_.size()) verdicts_.resize(size_t(match_.state) + 1, kUntried);
    verdicts_[match_.state] = accepted ? kRight : kWrong;
  }
  match_ = {};
}

int LookupText::take(std::span<const int32_t> token_ids, int most) {
  const auto news = token_ids.subspan(automaton_.size());
  const auto taken = news.first(std::min(news.size(), size_t(std::max(most, 0))));
  automaton_.add(taken);
  return int(taken.size());
}

void LookupText::look_up(std::span<const int32_t> token_ids) {
  if (size_t(automaton_.size()) != token_ids.size()) return;
  match_ = automaton_.match();
  size_ = automaton_.size();
  verdict_ = size_t(match_.state) < verdicts_.size() ? Verdict(verdicts_[match_.state]) : kUntried;
}

void LookupText::chances(const DraftConfidence& confidence, int most, std::vector<double>& chances) const {
  if (found()) {
    confidence.chances(match_.length, verdict_, most, chances);
  } else {
    chances.clear();
  }
}

std::vector<int32_t> LookupText::drafts(std::span<const int32_t> token_ids, int count) const {
  std::vector<int32_t> drafts;
  const int period = size_ - match_.end;  // where the match overlaps the end, the text repeats itself with this period
  for (int at = 0; at < count; at++) {
    drafts.push_back(at < period ? token_ids[match_.end + at] : drafts[size_t(at - period)]);
  }
  return drafts;
}

std::vector<std::vector<int32_t>> PromptLookup::propose(std::span<const LookupRequest> requests, int tokens) {
  for (const LookupRequest& request : requests) {
    if (request.token_ids.size() < size_t(request.text->size())) refuse("a text has become shorter");
  }
  chances_.resize(requests.size());
  int left = rules_.most_taken;
  for (size_t at = 0; at < requests.size(); at++) {
    const auto& [text, token_ids, most] = requests[at];
    text->learn(token_ids, confidence_);
    left -= text->take(token_ids, left);
    text->look_up(token_ids);
    text->chances(confidence_, most, chances_[at]);
  }
  std::vector<int> lengths = best_lengths(chances_, tokens, costs_, rules_.terms);
  const bool speaks = std::any_of(lengths.begin(), lengths.end(), [](int length) { return length > 0; });
  silent_ = speaks ? 0 : silent_ + 1;
  if (silent_ >= rules_.tried_every) {
    const auto likeliest = std::max_element(chances_.begin(), chances_.end());
    if (likeliest != chances_.end() && !likeliest->empty() && likeliest->front() >= rules_.tried_chance) {
      lengths[size_t(likeliest - chances_.begin())] = 1;
      silent_ = 0;
    }
  }
  std::vector<std::vector<int32_t>> drafts;
  for (size_t at = 0; at < requests.size(); at++) {
    drafts.push_back(requests[at].text->drafts(requests[at].token_ids, lengths[at]));
  }
  return drafts;
}

}  // namespace quire
