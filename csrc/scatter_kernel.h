// Copyright (c) 2026 The pinstage authors.
// SPDX-License-Identifier: Apache-2.0
//
// The kernel of scatter.h, as PTX that the driver compiles: the build needs no CUDA toolkit, and one text serves every
// GPU. PTX of the oldest version that current drivers take; it uses nothing newer.
//
// One block of 128 threads copies one piece of at most 8 KB: 4 vectors of 16 bytes a thread, so there is no loop. Every
// load of a thread is under way before its first store, because a load goes over PCIe and takes about a microsecond.
// Source and destination lie alike on 16 bytes (Scatter::add), so only the first and last 15 bytes need single ones.
//
// A descriptor that is none of this launch's writes nothing. There is none as long as nobody writes a slot in flight,
// which fences see to; where they are made to lie, to show that a test races, wrong bytes do less harm than a fault
// that takes the context with it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver.h"

namespace pinstage {

// What one block copies, as the kernel reads it.
struct ScatterPiece {
  DevicePtr dst;
  std::uint64_t nbytes : 16;  // dst % kScatterVector + nbytes <= kScatterPieceBytes
  std::uint64_t offset : 48;  // of the bytes in the slot; equal to dst modulo kScatterVector
};
static_assert(sizeof(ScatterPiece) == 16, "one vector load");

inline constexpr std::size_t kScatterVector = 16;
inline constexpr unsigned kScatterThreads = 128;
inline constexpr std::size_t kScatterPieceBytes = 4 * kScatterVector * kScatterThreads;

inline constexpr char kScatterName[] = "pinstage_scatter";

inline constexpr char kScatterPtx[] = R"ptx(
.version 5.0
.target sm_50
.address_size 64

.visible .entry pinstage_scatter(
    .param .u64 slot,      // as the device addresses it
    .param .u64 pieces,    // ScatterPiece[gridDim.x], behind the bytes of the slot
    .param .u64 first,     // where the lowest destination begins
    .param .u64 end        // where the highest one ends
)
.maxntid 128, 1, 1
{
    .reg .pred %foreign, %in_head, %in_tail, %in_body<4>;
    .reg .b32  %thread, %block, %nbytes, %head, %tail, %vectors, %at, %i<4>;
    .reg .b32  %head_byte, %tail_byte, %a<4>, %b<4>, %c<4>, %d<4>;
    .reg .b64  %slot, %pieces, %first, %end, %piece, %where, %distance, %src, %dst;
    .reg .b64  %src_head, %dst_head, %src_tail, %dst_tail, %src_body, %dst_body;

    // The block's piece.
    ld.param.u64      %slot, [slot];
    ld.param.u64      %pieces, [pieces];
    mov.u32           %block, %ctaid.x;
    mov.u32           %thread, %tid.x;
    mad.wide.u32      %piece, %block, 16, %pieces;
    ld.global.v2.u64  {%dst, %where}, [%piece];
    cvt.u32.u64       %nbytes, %where;
    and.b32           %nbytes, %nbytes, 0xffff;
    shr.u64           %distance, %where, 16;
    add.u64           %src, %slot, %distance;

    // Is it one of this launch?
    ld.param.u64      %first, [first];
    ld.param.u64      %end, [end];
    cvt.u64.u32       %distance, %nbytes;
    setp.lt.u64       %foreign, %dst, %first;
    setp.gt.or.u64    %foreign, %dst, %end, %foreign;
    add.u64           %where, %dst, %distance;
    setp.gt.or.u64    %foreign, %where, %end, %foreign;
    add.u64           %where, %src, %distance;
    setp.gt.or.u64    %foreign, %where, %pieces, %foreign;
    xor.b64           %where, %src, %dst;
    and.b64           %where, %where, 15;
    setp.ne.or.u64    %foreign, %where, 0, %foreign;
@%foreign ret;

    // Bytes up to the first vector of dst, whole vectors, bytes behind them.
    cvt.u32.u64       %head, %dst;
    neg.s32           %head, %head;
    and.b32           %head, %head, 15;
    min.u32           %head, %head, %nbytes;
    sub.u32           %tail, %nbytes, %head;
    shr.u32           %vectors, %tail, 4;
    and.b32           %tail, %tail, 15;

    // This thread's byte of the head, its byte of the tail, and its vectors: 128 apart, so 2048 bytes.
    setp.lt.u32       %in_head, %thread, %head;
    cvt.u64.u32       %distance, %thread;
    add.u64           %src_head, %src, %distance;
    add.u64           %dst_head, %dst, %distance;

    setp.lt.u32       %in_tail, %thread, %tail;
    sub.u32           %at, %nbytes, %tail;
    add.u32           %at, %at, %thread;
    cvt.u64.u32       %distance, %at;
    add.u64           %src_tail, %src, %distance;
    add.u64           %dst_tail, %dst, %distance;

    add.u32           %i1, %thread, 128;
    add.u32           %i2, %thread, 256;
    add.u32           %i3, %thread, 384;
    setp.lt.u32       %in_body0, %thread, %vectors;
    setp.lt.u32       %in_body1, %i1, %vectors;
    setp.lt.u32       %in_body2, %i2, %vectors;
    setp.lt.u32       %in_body3, %i3, %vectors;
    mad.lo.u32        %at, %thread, 16, %head;
    cvt.u64.u32       %distance, %at;
    add.u64           %src_body, %src, %distance;
    add.u64           %dst_body, %dst, %distance;

@%in_body0 ld.global.v4.u32  {%a0, %a1, %a2, %a3}, [%src_body];
@%in_body1 ld.global.v4.u32  {%b0, %b1, %b2, %b3}, [%src_body+2048];
@%in_body2 ld.global.v4.u32  {%c0, %c1, %c2, %c3}, [%src_body+4096];
@%in_body3 ld.global.v4.u32  {%d0, %d1, %d2, %d3}, [%src_body+6144];
@%in_head  ld.global.u8      %head_byte, [%src_head];
@%in_tail  ld.global.u8      %tail_byte, [%src_tail];

@%in_body0 st.global.v4.u32  [%dst_body], {%a0, %a1, %a2, %a3};
@%in_body1 st.global.v4.u32  [%dst_body+2048], {%b0, %b1, %b2, %b3};
@%in_body2 st.global.v4.u32  [%dst_body+4096], {%c0, %c1, %c2, %c3};
@%in_body3 st.global.v4.u32  [%dst_body+6144], {%d0, %d1, %d2, %d3};
@%in_head  st.global.u8      [%dst_head], %head_byte;
@%in_tail  st.global.u8      [%dst_tail], %tail_byte;
    ret;
}
)ptx";

}  // namespace pinstage
