#include "kernels/sampler/cpu.h"
#include "kernels/sampler/noise.h"
#include "kernels/sampler/select.h"
#include "kernels/simd/simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kLeastLogprob = -9999.0f;
static_assert(kGroup == kNoiseTokens);

struct Peak {
  float value;  // NaN where any value is
  int id;       // the lowest of equals
};

QUIRE_INLINE bool is_finite(float value) { return value - value == 0.0f; }

// kLanes values, or the last ones followed by -inf.
QUIRE_INLINE F load_some(const float* p, int count) {
  if (count >= kLanes) return load(p);
  float values[kLanes];
  store(values, splat(-kInfinity));
  if (count > 0) memcpy(values, p, size_t(count) * sizeof(float));
  return load(values);
}

QUIRE_INLINE I iota() {
  int32_t lanes[kLanes];
  for (int i = 0; i < kLanes; i++) lanes[i] = i;
  return load_int(lanes);
}

// Of the lanes' first maxima.
QUIRE_INLINE Peak highest(F values, I ids) {
  float value[kLanes];
  int32_t id[kLanes];
  store(value, values);
  store_int(id, ids);
  Peak peak = {value[0], id[0]};
  for (int i = 1; i < kLanes; i++) {
    if (value[i] > peak.value || (value[i] == peak.value && id[i] < peak.id)) peak = {value[i], id[i]};
  }
  return peak;
}

Peak find_peak(const float* values, int count) {
  F best = splat(-kInfinity), broken = zero();
  I ids = iota(), best_ids = ids;
  for (int i = 0; i < count; i += kLanes) {
    const F x = load_some(values + i, count - i);
    const Mask better = greater(x, best);
    best = select(better, x, best);
    best_ids = select(better, ids, best_ids);
    broken = select(not_a_number(x), x, broken);
    ids = add(ids, splat_int(kLanes));
  }
  Peak peak = highest(best, best_ids);
  if (any(not_a_number(broken))) peak.value = __builtin_nanf("");
  return peak;
}

// What `allowed` has no bit for becomes -inf, up to a whole 32 of `values`.
void keep_allowed(float* values, int vocab, const uint32_t* allowed) {
  for (int first = 0; first < vocab; first += 32) {
    uint32_t refused = ~allowed[first / 32];
    if (refused == ~0u) {
      for (int i = 0; i < 32; i += kLanes) store(values + first + i, splat(-kInfinity));
      continue;
    }
    for (; refused; refused &= refused - 1) values[first + __builtin_ctz(refused)] = -kInfinity;
  }
}

// The same of those that `allowed` has a bit for; -inf where all of them are, or there are none.
Peak find_allowed_peak(const float* values, int vocab, const uint32_t* allowed) {
  F best = splat(-kInfinity);
  I best_ids = iota();
  for (int first = 0; first < vocab; first += 32) {
    const int count = vocab - first < 32 ? vocab - first : 32;
    const uint32_t word = count < 32 ? allowed[first / 32] & ((1u << count) - 1) : allowed[first / 32];
    if (word == 0) continue;
    const float* some = values + first;
    float kept[32];
    if (word != ~0u) {
      memcpy(kept, some, size_t(count) * sizeof(float));
      for (uint32_t refused = ~word; refused; refused &= refused - 1) kept[__builtin_ctz(refused)] = -kInfinity;
      some = kept;
    }
    for (int i = 0; i < 32; i += kLanes) {
      const F x = load(some + i);
      const Mask better = greater(x, best);
      best = select(better, x, best);
      best_ids = select(better, add(iota(), splat_int(first + i)), best_ids);
    }
  }
  return highest(best, best_ids);
}

// `value` of a token that occurs `outputs` times in the output.
QUIRE_INLINE float penalized(float value, int outputs, const SamplingRule& rule) {
  const float repetition = float(rule.repetition_penalty);
  if (repetition != 1.0f) value = value > 0.0f ? value / repetition : value * repetition;
  if (outputs > 0) value -= float(rule.frequency_penalty * outputs + rule.presence_penalty);
  return value;
}

// `drafted` [history.draft_count] is scratch.
void apply_rules(float* values, const SamplingRule& rule, const History& history, uint32_t output_position,
                 float* drafted) {
  for (int i = 0; i < rule.bias_count; i++) values[rule.bias_ids[i]] += rule.bias[i];
  if (bans(rule, output_position)) {
    for (int i = 0; i < rule.banned_count; i++) values[rule.banned[i]] = -kInfinity;
  }
  if (!penalizes(rule)) return;
  for (int i = 0; i < history.draft_count; i++) drafted[i] = values[history.drafts[i]];
  for (int i = 0; i < history.size; i++) {
    const int32_t id = history.ids[i];
    values[id] = penalized(values[id], history.seen[id] - 1, rule);
  }
  for (int i = 0; i < history.draft_count; i++) {
    const int32_t id = history.drafts[i];
    int outputs = history.seen[id] > 0 ? history.seen[id] - 1 : 0;
    for (int j = 0; j < history.draft_count; j++) outputs += history.drafts[j] == id;
    values[id] = penalized(drafted[i], outputs, rule);
  }
}

// (value - peak) / temperature - offset for each of values [vocab], which may be scratch.values.
QUIRE_INLINE Row fill_row(const float* values, int vocab, float peak, float temperature, float offset,
                          const SamplerScratch& scratch) {
  const Row row = {scratch.values, scratch.peaks, vocab, (vocab + kGroup - 1) / kGroup};
  for (int group = 0; group < row.groups; group++) {
    F most = splat(-kInfinity);
    for (int i = group * kGroup; i < (group + 1) * kGroup; i += kLanes) {
      F x = sub(load_some(values + i, vocab - i), splat(peak));
      x = sub(div(x, splat(temperature)), splat(offset));
      store(row.values + i, x);
      most = max(most, x);
    }
    row.peaks[group] = reduce_max(most);
  }
  return row;
}

// Sums kLanes columns in double precision.
struct Sums {
  double lanes[kLanes];
};
QUIRE_INLINE void accumulate(Sums& sums, F values) {
  float parts[kLanes];
  store(parts, values);
  for (int lane = 0; lane < kLanes; lane++) sums.lanes[lane] += double(parts[lane]);
}
QUIRE_INLINE double total(const Sums& sums) {
  double sum = 0.0;
  for (int lane = 0; lane < kLanes; lane++) sum += sums.lanes[lane];
  return sum;
}

// Sum of e^value over the values from `from` on; leaves the terms in scratch.weights, except for groups without any.
double weigh(const Row& row, float from, const SamplerScratch& scratch) {
  Sums sums = {};
  for (int group = 0; group < row.groups; group++) {
    if (row.peaks[group] < from) continue;
    for (int i = group * kGroup; i < (group + 1) * kGroup; i += kLanes) {
      const F x = load(row.values + i), weights = select(greater(splat(from), x), zero(), exp(x));
      store(scratch.weights + i, weights);
      accumulate(sums, weights);
    }
  }
  return total(sums);
}

// What the weights of the values of [from, below) sum to.
double weight_within(const Row& row, float from, float below, const SamplerScratch& scratch) {
  Sums sums = {};
  for (int group = 0; group < row.groups; group++) {
    if (row.peaks[group] < from) continue;
    for (int i = group * kGroup; i < (group + 1) * kGroup; i += kLanes) {
      const F x = load(row.values + i), weights = load(scratch.weights + i);
      accumulate(sums, select(greater(splat(from), x), zero(), select(greater(splat(below), x), weights, zero())));
    }
  }
  return total(sums);
}

// The highest value at which the e^value of what is no lower sum to top_p of all e^value from `floor` on.
float nucleus_floor(const Row& row, float floor, double top_p, const SamplerScratch& scratch) {
  const double all = weigh(row, floor, scratch);
  // The whole vocabulary just below this would not sum to what top_p leaves out.
  const float bound = float(__builtin_log((1.0 - top_p) * all / row.vocab)) - 1e-3f;
  const float least = bound > floor ? bound : floor;
  double target = top_p * all;
  float from = -1.5f, below = kInfinity;
  while (from > least) {  // whole slabs, until the one in which the target is reached
    const double sum = weight_within(row, from, below, scratch);
    if (sum >= target) break;
    target -= sum;
    below = from;
    from *= 1.5f;
  }
  const int count = pick(row, from > least ? from : least, below, scratch);
  for (int i = 0; i < count; i += kLanes) store(scratch.weights + i, exp(load(scratch.picked + i)));
  return count > 0 ? select_by_weight(scratch.picked, scratch.weights, count, target) : below;
}

// The least value that may be drawn.
float floor_of(const Row& row, const SamplingRule& rule, const SamplerScratch& scratch) {
  float floor = -kInfinity;
  if (0 < rule.top_k && rule.top_k < row.vocab) floor = value_of_rank(row, int(rule.top_k), scratch);
  if (rule.top_p < 1.0) floor = nucleus_floor(row, floor, rule.top_p, scratch);
  if (rule.min_p > 0.0) {
    const float least = float(__builtin_log(rule.min_p));
    floor = floor > least ? floor : least;
  }
  return floor;
}

// The token whose value plus noise is highest, among those that are at least `floor`; `peak` is one of value 0.
int32_t draw_noisy(const Row& row, float floor, int peak, const Noise& noise) {
  F best = splat(-kInfinity);
  I best_ids = splat_int(peak);
  float found = reduce_max(gumbel(splat_int(word_of(noise, peak))));
  for (int group = 0; group < row.groups; group++) {
    // What noise cannot lift to what is found already is left out.
    if (row.peaks[group] < floor || row.peaks[group] + kMostGumbel < found) continue;
    I random[4];
    words(noise, group * kGroup, random);
    for (int i = 0; i < 4; i++) {
      const int first = group * kGroup + i * kLanes;
      const F value = load(row.values + first);
      if (!any(greater(add(value, above_gumbel(random[i])), splat(found)))) continue;
      const F noisy = select(greater(splat(floor), value), splat(-kInfinity), add(value, gumbel(random[i])));
      const Mask better = greater(noisy, best);
      best = select(better, noisy, best);
      best_ids = select(better, add(iota(), splat_int(first)), best_ids);
      const float most = reduce_max(best);
      found = most > found ? most : found;
    }
  }
  return highest(best, best_ids).id;
}

// The `count` highest values in order, equal ones by ascending id.
void list_highest(const Row& row, int count, int32_t* ids, float* values, const SamplerScratch& scratch) {
  if (count == 0) return;
  const float least = value_of_rank(row, count, scratch);
  int listed = 0;
  for (int group = 0; group < row.groups; group++) {
    if (row.peaks[group] < least) continue;
    for (int id = group * kGroup; id < (group + 1) * kGroup && id < row.vocab; id++) {
      const float value = row.values[id];
      if (value < least || (listed == count && value <= values[count - 1])) continue;
      int at = listed < count ? listed++ : count - 1;
      for (; at > 0 && values[at - 1] < value; at--) {
        values[at] = values[at - 1];
        ids[at] = ids[at - 1];
      }
      values[at] = value;
      ids[at] = id;
    }
  }
}

}  // namespace

int32_t draw(const float* logits, int vocab, const SamplingRule& rule, const History& history, uint32_t output_position,
             const uint32_t* allowed, const SamplerScratch& scratch) {
  Peak peak = find_peak(logits, vocab);
  if (!is_finite(peak.value)) return -1;
  if (allowed && takes_argmax(rule, output_position)) {
    peak = find_allowed_peak(logits, vocab, allowed);
    return is_finite(peak.value) ? peak.id : -1;
  }
  const float* values = logits;
  if (allowed || changes_logits(rule, output_position)) {
    memcpy(scratch.values, logits, size_t(vocab) * sizeof(float));
    apply_rules(scratch.values, rule, history, output_position, scratch.picked);
    if (allowed) keep_allowed(scratch.values, vocab, allowed);
    values = scratch.values;
    peak = find_peak(values, vocab);
    if (!is_finite(peak.value)) return -1;
  }
  if (is_greedy(rule)) return peak.id;
  const Row row = fill_row(values, vocab, peak.value, float(rule.temperature), 0.0f, scratch);
  return draw_noisy(row, floor_of(row, rule, scratch), peak.id, noise_of(rule, output_position));
}

TokenScore score(const float* logits, int vocab, int target, int count, int32_t* top_ids, float* top_logprobs,
                 const SamplerScratch& scratch) {
  const float peak = find_peak(logits, vocab).value;
  count = count < vocab ? count : vocab;
  if (!is_finite(peak)) {
    for (int i = 0; i < count; i++) {
      top_ids[i] = i;
      top_logprobs[i] = __builtin_nanf("");
    }
    return {__builtin_nanf(""), 1};
  }
  Row row = fill_row(logits, vocab, peak, 1.0f, 0.0f, scratch);
  const float log_sum = float(__builtin_log(weigh(row, -kInfinity, scratch)));
  row = fill_row(logits, vocab, peak, 1.0f, log_sum, scratch);
  const F chosen = splat(row.values[target]);
  I likelier = splat_int(0);
  for (int i = 0; i < row.groups * kGroup; i += kLanes) {
    likelier = add(likelier, select(greater(load(row.values + i), chosen), splat_int(1), splat_int(0)));
  }
  list_highest(row, count, top_ids, top_logprobs, scratch);
  for (int i = 0; i < count; i++) top_logprobs[i] = top_logprobs[i] > kLeastLogprob ? top_logprobs[i] : kLeastLogprob;
  const float logprob = row.values[target];
  return {logprob > kLeastLogprob ? logprob : kLeastLogprob, reduce_add(likelier) + 1};
}

void noise_words(const SamplingRule& rule, uint32_t output_position, int vocab, uint32_t* words_out) {
  const Noise noise = noise_of(rule, output_position);
  for (int first = 0; first < vocab; first += kNoiseTokens) {
    I random[4];
    words(noise, first, random);
    int32_t group[kNoiseTokens];
    for (int i = 0; i < 4; i++) store_int(group + i * kLanes, random[i]);
    const int count = vocab - first < kNoiseTokens ? vocab - first : kNoiseTokens;
    memcpy(words_out + first, group, size_t(count) * sizeof(uint32_t));
  }
}

}  // namespace quire::QUIRE_ISA
