// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The snapshots: view tensors, take a slot, snapshot or gather into it, submit the copy, record its fence. One call
// each, made without the GIL. The caller may write the source as soon as the call returns.
#pragma once

#include <vector>

#include "convert.h"
#include "gather.h"
#include "pool.h"
#include "strided.h"
#include "tensor_view.h"

namespace pinstage {

// dst (device memory, laid out as `plan`) <- src (dense host memory of plan.nbytes() bytes).
void stage_copy(Pool& pool, const CopyPlan& plan, const TensorView& dst, const TensorView& src, Stream stream,
                const Wait& wait);

// The same from a strided or broadcast source of dst's dtype.
void stage_strided(Pool& pool, const CopyPlan& plan, const TensorView& dst, const Strided& source, Stream stream,
                   const Wait& wait);

// The same from a dense source of another dtype.
void stage_converted(Pool& pool, const CopyPlan& plan, const TensorView& dst, const TensorView& src, Conversion convert,
                     Stream stream, const Wait& wait);

// dst <- the gathered rows; `rows` with its destination left out: it is filled in with the slot. The index was checked.
// *ticket is done when all of them have arrived.
void stage_rows(Pool& pool, const CopyPlan& plan, DevicePtr dst, Gather rows, Stream stream, const Wait& wait,
                Ticket* ticket = nullptr);

// dst <- the segments, which lie one behind the other in plan.nbytes() bytes.
void stage_segments(Pool& pool, const CopyPlan& plan, char* dst, const std::vector<Segment>& segments, Stream stream,
                    const Wait& wait);

// dst.narrow(dim, 0, count), the part of dst that a gather of `count` rows writes.
TensorView narrow(const TensorView& dst, int dim, std::int64_t count);

// The gather of dim's rows of `src` by `index` into dense memory (dst is nullptr), when one row is one run of bytes and
// everything before `dim` is one outer stride; false otherwise.
bool plan_gather(const TensorView& src, int dim, const TensorView& index, Gather* out);

}  // namespace pinstage
