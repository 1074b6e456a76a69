// The fields of the types that several messages contain: requests, a rank's notices, and its answer for a stall
// report.
#pragma once

#include "control/messages/archive.h"
#include "control/messages/messages.h"
#include "plan/plan.h"

namespace sirtaki {

// Returns whether numbers and lists are consistent, and values computed from them do not overflow.
bool is_sane(const Signature& signature);

void fields(auto& archive, MessageOf<Signature> auto& signature) {
  archive.enumeration(signature.kind, last_requested_kind);
  archive.enumeration(signature.dtype, last_dtype);
  archive.enumeration(signature.reduce_op, last_reduce_op);
  archive.number(signature.process_set);
  archive.number(signature.root);
  archive.number(signature.destination);
  archive.number(signature.device);
  archive.number(signature.priority);
  archive.number(signature.group_size);
  archive.number(signature.group_id);
  archive.number(signature.layout);
  bool has_deadline = signature.deadline.has_value();
  archive.enumeration(signature.wire_format, last_wire_format, has_deadline);
  archive.number(signature.prescale);
  archive.number(signature.postscale);
  archive.name(signature.name);
  archive.list(signature.shape);
  archive.list(signature.splits);
  archive.optional(signature.deadline, has_deadline, [&](auto& deadline) {
    archive.number(deadline.after);
    archive.number(deadline.quorum);
    archive.number(deadline.round);
  });
  archive.check(is_sane(signature));
}

void fields(auto& archive, MessageOf<StalledRankReport> auto& report) {
  archive.number(report.rank);
  archive.number(report.answers);
  archive.number(report.leader);
  archive.name(report.waits_for);
  archive.each(report.frames, [&](auto& frame) {
    archive.printable_text(frame.function, longest_frame_text);
    archive.printable_text(frame.file, longest_frame_text);
    archive.number(frame.line);
  });
  archive.check(report.frames.size() <= most_frames);
}

void fields(auto& archive, MessageOf<RankNotices> auto& notices) {
  bool goodbye = notices.goodbye, has_report = notices.wait_report.has_value();
  archive.flags(goodbye, has_report);
  if constexpr (!std::is_const_v<std::remove_reference_t<decltype(notices)>>) notices.goodbye = goodbye;
  archive.number(notices.lapsed);
  archive.list(notices.joined);
  archive.optional(notices.wait_report, has_report, [&](auto& report) { fields(archive, report); });
}

}  // namespace sirtaki
