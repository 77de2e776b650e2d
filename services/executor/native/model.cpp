#include "services/executor/native/model.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "services/executor/native/refuse.h"

namespace quire {
namespace {

int most_ordered_columns(const Program& program) {
  int most = 0;
  for (const Op& op : program.ops) {
    if (op.order) most = std::max(most, op.matrices[0].k);
  }
  return most;
}

}  // namespace

Model::Model(Program program, std::shared_ptr<ThreadPool> pool, const KernelTable& kernels)
    : program_(std::move(program)),
      pool_(std::move(pool)),
      kernels_(kernels),
      space_(program_.shape, most_ordered_columns(program_), pool_->size()) {
  check(program_);
  const Shape& s = program_.shape;
  rotations_ = Memory(size_t(s.context_length) * s.half * 2 * sizeof(float));
  for (const ThreadSpace& thread : space_.threads) bests_.push_back(thread.best);
  // Filled by a thread in the middle of a step, which may not fail there.
  runs_.reserve(kHeadRows);
  logit_rows_.reserve(kHeadRows);
}

// Angles are rounded to fp32, as the models were trained.
void Model::extend_rotations(int positions) {
  const Shape& s = program_.shape;
  positions = std::min((positions + 255) / 256 * 256, s.context_length);
  float* cosines = reinterpret_cast<float*>(rotations_.data());
  float* sines = cosines + size_t(s.context_length) * s.half;
  for (; rotated_ < positions; rotated_++) {
    for (int i = 0; i < s.half; i++) {
      const double angle = double(float(rotated_) * s.rotary_frequencies[size_t(i)]);
      cosines[size_t(rotated_) * s.half + i] = float(std::cos(angle));
      sines[size_t(rotated_) * s.half + i] = float(std::sin(angle));
    }
  }
}

void Model::choose_ops(int layers) {
  const std::vector<Op>& all = program_.ops;
  if (layers < 0 || layers > program_.shape.layers) refuse("layers is not a number of the model's");
  if (layers == 0 || layers == program_.shape.layers) {
    ops_ = all;
    return;
  }
  const size_t count = 1 + size_t(layers) * kLayerOps;
  if (early_ops_.size() != count + 1) {
    early_ops_.assign(all.begin(), all.begin() + ptrdiff_t(count));
    early_ops_.push_back(all.back());
  }
  ops_ = early_ops_;
}

void Model::step(const StepInputs& inputs, std::span<const WantedRow> wanted, const RowSink& sink, int layers,
                 std::span<const PooledRows> pooled) {
  const Shape& s = program_.shape;
  check(inputs, s, block_counts_, hot_format_);
  for (const WantedRow& row : wanted) {
    if (row.token < 0 || row.token >= inputs.tokens()) refuse("a wanted row is not one of the step's tokens");
  }
  for (const PooledRows& part : pooled) {
    if (part.first < 0 || part.count < 0 || part.first > inputs.tokens() - part.count) {
      refuse("a pooled row is not one of the step's tokens");
    }
  }
  choose_ops(layers);
  inputs_ = &inputs;
  wanted_ = wanted;
  pooled_ = pooled;
  sink_ = &sink;
  space_.reserve(inputs.tokens());
  extend_rotations(*std::max_element(inputs.context_lengths.begin(), inputs.context_lengths.end()));
  attention_.build(inputs, s, hot_format_, threads());
  states_ = space_.reserve_states(attention_.state_floats_needed());
  for (size_t i = 0; i < bests_.size(); i++) bests_[i] = space_.threads[i].best;
  logits_ = std::any_of(wanted.begin(), wanted.end(), [](const WantedRow& row) { return row.needs_logits; })
                ? space_.logits()
                : nullptr;
  token_blocks_.resize(size_t(inputs.tokens()));
  uint8_t* hot = kv_[hot_format_].data();
  const size_t stride = block_bytes(hot_format_);
  for (int sequence = 0; sequence < inputs.sequences(); sequence++) {
    const int32_t* table = inputs.block_tables.data() + size_t(sequence) * inputs.table_width;
    for (int t = inputs.query_starts[sequence]; t < inputs.query_starts[sequence + 1]; t++) {
      token_blocks_[size_t(t)] = hot + size_t(table[inputs.positions[t] / kBlockTokens]) * stride;
    }
  }
  cut_runs(0, std::min(int(wanted_.size()), kHeadRows));
  auto work = [this](int thread) { run(thread); };
  pool_->run(work);
}

void Model::cut_runs(int first_row, int count) {
  runs_.clear();
  logit_rows_.clear();
  int logit_rows = 0;
  for (int row = 0; row < count; row++) {
    const WantedRow& wanted = wanted_[size_t(first_row + row)];
    logit_rows_.push_back(wanted.needs_logits ? logit_rows++ : -1);
    if (!runs_.empty() && runs_.back().token + runs_.back().count == wanted.token) {
      runs_.back().count++;
    } else {
      runs_.push_back({row, wanted.token, 1});
    }
  }
}

void Model::run(int thread) {
  for (size_t i = 0; i < ops_.size(); i++) {
    const Op& op = ops_[i];
    switch (op.kind) {
      case OpKind::kEmbed:
        embed(op, i, thread);
        break;
      case OpKind::kQkv:
        qkv(op, i, thread);
        break;
      case OpKind::kAttention:
        attention(op, i, thread);
        break;
      case OpKind::kAttentionOutput:
      case OpKind::kDown:
        project(op, i, thread);
        break;
      case OpKind::kGateUp:
        gate_up(op, i, thread);
        break;
      case OpKind::kHead:
        head(op, thread);
        break;
    }
  }
}

int Model::multiplied_forms(const Op& op) const {
  int forms = 0;
  for (const Matrix& matrix : op.matrices) {
    if (matrix.data) forms |= kernels_.activation_form(matrix.format);
  }
  return forms;
}

// The forms in which this operation's inputs are left for it.
int Model::written_forms(const Op& op) const { return op.order ? int(kFloatForm) : multiplied_forms(op); }

// What the operation multiplies, from what was written for it; in an order of its own, by all threads together.
Activation Model::inputs_of(const Op& op, const Activation& written, int thread) {
  if (!op.order) return written;
  Activation ordered = space_.ordered;
  ordered.k = written.k;
  const int forms = multiplied_forms(op), tokens = inputs_->tokens();
  pool_->for_each(thread, ordered.k / 32,
                  [&](int group) { kernels_.reorder_group(written, op.order, ordered, forms, tokens, group); });
  pool_->barrier(thread);
  return ordered;
}

NormFor Model::norm_after(size_t index) const {
  while (!ops_[++index].norm) continue;
  return {ops_[index].norm, written_forms(ops_[index])};
}

// Where the thread's own range of the next matrix begins.
Ahead Model::first_panel_after(size_t index, int thread) const {
  const Op& next = ops_[index + 1];
  const Op& reader = next.kind == OpKind::kAttention ? ops_[index + 2] : next;
  const Matrix& matrix = reader.matrices[0];
  int first = pool_->first_of(thread, matrix.panels());
  if (reader.kind == OpKind::kGateUp) first = 2 * pool_->first_of(thread, matrix.panels() / 2);
  if (reader.kind == OpKind::kQkv) {
    first = pool_->first_of(thread, matrix.panels() + reader.matrices[1].panels() + reader.matrices[2].panels());
    if (first >= matrix.panels()) return {};
  }
  return matrix.ahead(first);
}

void Model::panel_times_tokens(const Matrix& matrix, int panel, const Activation& in, int first, int count, float* sums,
                               Ahead ahead) const {
  kernels_.panel_kernel(matrix.format)(matrix.panel(panel), in, first, count, sums, ahead);
}

void Model::embed(const Op& op, size_t index, int thread) {
  const NormFor next = norm_after(index);
  const Matrix& matrix = op.matrices[0];
  pool_->for_each(thread, inputs_->tokens(), [&](int token) {
    kernels_.embed(space_.stream, next, matrix.format, matrix.data, token, inputs_->token_ids[size_t(token)]);
  });
  pool_->barrier(thread);
}

void Model::qkv(const Op& op, size_t index, int thread) {
  const Shape& s = program_.shape;
  const ThreadSpace& mine = space_.threads[size_t(thread)];
  const int tokens = inputs_->tokens();
  const Activation in = inputs_of(op, space_.normed, thread);
  kernels_.inverse_rms(space_.stream, tokens, s.hidden_size, s.norm_epsilon, mine.inverse_rms);
  QkvTarget target;
  target.heads = s.heads;
  target.kv_heads = s.kv_heads;
  target.half = s.half;
  target.inverse_rms = mine.inverse_rms;
  target.cosines = reinterpret_cast<const float*>(rotations_.data());
  target.sines = target.cosines + size_t(s.context_length) * s.half;
  target.positions = inputs_->positions.data();
  target.query_scale = s.attention_scale * 1.44269504f;
  target.queries = space_.queries;
  target.kv_format = KvFormat(hot_format_);
  target.blocks = token_blocks_.data();
  target.layer_offset = layer_bytes(hot_format_) * size_t(op.layer);
  const int panels[3] = {op.matrices[0].panels(), op.matrices[1].panels(), op.matrices[2].panels()};
  const int count = panels[0] + panels[1] + panels[2], own_end = pool_->first_of(thread + 1, count);
  const Ahead after = first_panel_after(index, thread);
  auto locate = [&](int panel) -> std::pair<const Matrix&, int> {
    int part = 0;
    while (panel >= panels[part]) panel -= panels[part++];
    return {op.matrices[part], panel};
  };
  pool_->for_each(thread, count, [&](int panel) {
    const auto [matrix, local] = locate(panel);
    Ahead ahead = after;
    if (panel + 1 < own_end) {
      const auto [next, next_local] = locate(panel + 1);
      ahead = next.ahead(next_local);
    }
    for (int first = 0; first < tokens; first += kTokenTile) {
      const int n = std::min(kTokenTile, tokens - first);
      panel_times_tokens(matrix, local, in, first, n, mine.sums, first == 0 ? ahead : Ahead{});
      kernels_.rotate_and_store(target, mine.sums, first, n, panel, op.bias ? op.bias + size_t(panel) * 32 : nullptr);
    }
  });
  pool_->barrier(thread);
}

void Model::attention(const Op& op, size_t index, int thread) {
  const Shape& s = program_.shape;
  AttentionLayer layer;
  layer.heads = s.heads;
  layer.kv_heads = s.kv_heads;
  layer.half = s.half;
  layer.queries = space_.queries;
  layer.positions = inputs_->positions.data();
  for (int format = 0; format < kKvFormatCount; format++) {
    uint8_t* base = kv_[format].data();
    layer.pools[format] = {base ? base + layer_bytes(format) * size_t(op.layer) : nullptr, block_bytes(format)};
  }
  layer.out = &space_.attended;
  layer.forms = written_forms(ops_[index + 1]);
  float* scratch = space_.threads[size_t(thread)].scratch;
  const auto works = attention_.works();
  const auto splits = attention_.splits();
  if (splits.empty()) {
    pool_->for_each(thread, int(works.size()), [&](int i) {
      const size_t next = size_t(i) + 1;
      kernels_.attend(layer, works[size_t(i)], next < works.size() ? &works[next] : nullptr, scratch);
    });
  } else {
    pool_->for_each(thread, int(splits.size()), [&](int i) {
      const AttentionPlan::Split& split = splits[size_t(i)];
      const AttentionWork& work = works[size_t(split.work)];
      const size_t floats = state_floats(work.token_count * (s.heads / s.kv_heads), s.half);
      float* states = states_ + split.state;
      kernels_.attend_split(layer, work, split.index, scratch, states + floats * size_t(split.index));
      if (attention_.finish_split(split.work)) {
        kernels_.merge_splits(layer, work, attention_.split_count(split.work), states, scratch);
      }
    });
  }
  pool_->barrier(thread);
}

void Model::project(const Op& op, size_t index, int thread) {
  const NormFor next = norm_after(index);
  const Matrix& matrix = op.matrices[0];
  const Activation in = inputs_of(op, op.kind == OpKind::kDown ? space_.inner : space_.attended, thread);
  const Ahead after = first_panel_after(index, thread);
  float* sums = space_.threads[size_t(thread)].sums;
  const int tokens = inputs_->tokens(), own_end = pool_->first_of(thread + 1, matrix.panels());
  pool_->for_each(thread, matrix.panels(), [&](int panel) {
    const Ahead ahead = panel + 1 < own_end ? matrix.ahead(panel + 1) : after;
    for (int first = 0; first < tokens; first += kTokenTile) {
      const int n = std::min(kTokenTile, tokens - first);
      panel_times_tokens(matrix, panel, in, first, n, sums, first == 0 ? ahead : Ahead{});
      kernels_.add_residual(space_.stream, next, sums, first, n, panel, op.bias);
    }
  });
  pool_->barrier(thread);
}

void Model::gate_up(const Op& op, size_t index, int thread) {
  const Shape& s = program_.shape;
  const Matrix& matrix = op.matrices[0];
  const ThreadSpace& mine = space_.threads[size_t(thread)];
  const int tokens = inputs_->tokens(), groups = s.intermediate_size / 32,
            own_end = pool_->first_of(thread + 1, groups);
  const int forms = written_forms(ops_[index + 1]);
  const Activation in = inputs_of(op, space_.normed, thread);
  const Ahead after = first_panel_after(index, thread);
  float* second_sums = mine.sums + kTokenTile * 32;
  kernels_.inverse_rms(space_.stream, tokens, s.hidden_size, s.norm_epsilon, mine.inverse_rms);
  pool_->for_each(thread, groups, [&](int group) {
    const Ahead ahead = group + 1 < own_end ? matrix.ahead(2 * group + 2) : after;
    for (int first = 0; first < tokens; first += kTokenTile) {
      const int n = std::min(kTokenTile, tokens - first);
      panel_times_tokens(matrix, 2 * group, in, first, n, mine.sums,
                         first == 0 ? matrix.ahead(2 * group + 1) : Ahead{});
      panel_times_tokens(matrix, 2 * group + 1, in, first, n, second_sums, first == 0 ? ahead : Ahead{});
      kernels_.silu_mul(space_.inner, forms, mine.sums, second_sums, first, n, group, mine.inverse_rms,
                        op.bias ? op.bias + size_t(group) * 64 : nullptr);
    }
  });
  pool_->barrier(thread);
}

void Model::head(const Op& op, int thread) {
  const Shape& s = program_.shape;
  const Matrix& matrix = op.matrices[0];
  const ThreadSpace& mine = space_.threads[size_t(thread)];
  const int rows = int(wanted_.size());
  if (rows == 0 && pooled_.empty()) return;
  const Activation in = inputs_of(op, space_.normed, thread);
  kernels_.inverse_rms(space_.stream, inputs_->tokens(), s.hidden_size, s.norm_epsilon, mine.inverse_rms);
  pool_states(op.norm, mine.inverse_rms, thread);
  for (int first_row = 0; first_row < rows; first_row += kHeadRows) {
    const int count = std::min(kHeadRows, rows - first_row);
    if (first_row > 0) {
      if (thread == 0) cut_runs(first_row, count);
      pool_->barrier(thread);
    }
    HeadTarget target;
    target.inverse_rms = mine.inverse_rms;
    target.logit_rows = logit_rows_.data();
    target.logits = logits_;
    target.row_stride = space_.logit_stride;
    target.vocab_size = s.vocab_size;
    kernels_.clear_best(mine.best, count);
    pool_->for_each(thread, matrix.panels(), [&](int panel) {
      Ahead ahead;
      if (panel + 1 < matrix.panels()) ahead = matrix.ahead(panel + 1);
      for (const Run& run : runs_) {
        for (int i = 0; i < run.count; i += kTokenTile) {
          const int n = std::min(kTokenTile, run.count - i);
          panel_times_tokens(matrix, panel, in, run.token + i, n, mine.sums, ahead);
          kernels_.head_panel(target, mine.best, mine.sums, run.token + i, run.row + i, n, panel);
          ahead = {};
        }
      }
    });
    pool_->barrier(thread);
    pool_->for_each(thread, count, [&](int row) {
      const int logit_row = logit_rows_[size_t(row)];
      if (logit_row >= 0) {
        (*sink_)(first_row + row, logits_ + size_t(logit_row) * space_.logit_stride, -1, thread);
      } else {
        (*sink_)(first_row + row, nullptr, kernels_.best_token(bests_.data(), int(bests_.size()), row), thread);
      }
    });
    pool_->barrier(thread);
  }
}

}  // namespace quire
