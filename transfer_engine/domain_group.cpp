#include "domain_group.hpp"

#include <algorithm>
#include <string_view>

namespace transfer_engine
{

// Not called by those that take part in a transfer: messages are for failures.
static Status failure(Code code, std::string message)
{
    return {.code = code, .remote_may_have_changed = false, .message = std::move(message)};
}

size_t DomainGroup::HashAddress::operator()(const NetAddr &address) const
{
    return std::hash<std::string_view>()({reinterpret_cast<const char *>(address.bytes.data()), address.length});
}

DomainGroup::DomainGroup(std::vector<std::unique_ptr<Domain>> nics, GroupEvents *listener,
                         std::chrono::nanoseconds patience)
    : domains(std::move(nics)), events(listener), abort_after(patience), peers(domains.size())
{
    active.reserve(64);
}

DomainGroup::~DomainGroup() { close(); }

Status DomainGroup::find_peer(size_t nic, const NetAddr &address, Peer **peer)
{
    auto &known = peers[nic];
    if (const auto found = known.find(address); found != known.end()) {
        *peer = found->second.get();
        return {};
    }
    uint32_t number = 0;
    Status status = domains[nic]->find_peer(address, &number);
    if (!status.ok()) return status;
    auto made = std::make_unique<Peer>();
    made->address = address;
    made->nic = nic;
    made->number = number;
    *peer = made.get();
    known.emplace(address, std::move(made));
    return status;
}

// ------------------------------------------------------------------------------- cutting, by T10

// The last byte of every page has to be inside its region.
static Status check_pages(const char *side, const Pages &pages, uint64_t page_length, uint64_t region_length)
{
    if (pages.indices.empty()) return {};
    const uint64_t last = *std::max_element(pages.indices.begin(), pages.indices.end());
    uint64_t end = 0;
    if (!__builtin_mul_overflow(last, pages.stride, &end) && !__builtin_add_overflow(end, pages.offset, &end) &&
        !__builtin_add_overflow(end, page_length, &end) && end <= region_length)
        return {};
    return failure(Code::invalid, std::string(side) + " page " + std::to_string(last) + " of " +
                                      std::to_string(page_length) + " bytes, stride " + std::to_string(pages.stride) +
                                      ", offset " + std::to_string(pages.offset) + ": beyond its region of " +
                                      std::to_string(region_length) + " bytes");
}

// Work requests for so many bytes. An immediate needs one even where there are none.
uint64_t DomainGroup::pieces(size_t nic, uint64_t length, bool imm) const
{
    const uint64_t longest = domains[nic]->longest_request();
    return std::max<uint64_t>(imm ? 1 : 0, length / longest + (length % longest != 0 ? 1 : 0));
}

Status DomainGroup::add_share(Submission *submission, const NetAddr &peer, Share share)
{
    if (share.next == share.end) return {};
    Status status = find_peer(share.nic, peer, &share.peer);
    if (status.ok()) submission->shares.push_back(share);
    return status;
}

Status DomainGroup::cut(Submission *submission)
{
    Submission &s = *submission;
    const bool imm = s.imm.has_value();
    Status status;
    switch (s.kind) {
    case Submission::single:
        s.bytes = s.length;
        for (size_t nic = 0; nic < nics() && status.ok(); ++nic) {
            const Range bytes = share_of(s.length, nics(), nic, share_alignment);
            status = add_share(&s, s.remote.rkeys[nic].address,
                               {.nic = nic, .end = pieces(nic, bytes.size(), imm), .bytes = bytes});
        }
        break;
    case Submission::paged: {
        const uint64_t pages = s.local_pages.indices.size();
        s.bytes = pages * s.length;
        status = check_pages("local", s.local_pages, s.length, s.region->length);
        if (status.ok()) status = check_pages("remote", s.remote_pages, s.length, s.remote.length);
        if (s.length == 0 && !imm) break;
        for (size_t nic = 0; nic < nics() && status.ok(); ++nic) {
            const Range share = share_of(pages, nics(), nic);
            if (s.length > domains[nic]->longest_request())
                status = failure(Code::invalid, "page of " + std::to_string(s.length) + " bytes: the adapter takes " +
                                                    std::to_string(domains[nic]->longest_request()) + " at most");
            else
                status =
                    add_share(&s, s.remote.rkeys[nic].address, {.nic = nic, .next = share.begin, .end = share.end});
        }
        break;
    }
    case Submission::scatter:
        for (size_t i = 0; i < s.slices.size() && status.ok(); ++i) {
            const ScatterDst &slice = s.slices[i];
            const size_t nic = nic_of_target(i, first_nic, nics());
            s.bytes += slice.length;
            status = add_share(&s, slice.dst.rkeys[nic].address,
                               {.nic = nic,
                                .end = pieces(nic, slice.length, imm),
                                .bytes = {.begin = 0, .end = slice.length},
                                .target = i});
        }
        first_nic = nic_of_target(s.slices.size(), first_nic, nics());
        break;
    case Submission::barrier:
        for (size_t i = 0; i < s.targets.size() && status.ok(); ++i) {
            const size_t nic = nic_of_target(i, first_nic, nics());
            status = add_share(&s, s.targets[i].rkeys[nic].address, {.nic = nic, .end = 1, .target = i});
        }
        first_nic = nic_of_target(s.targets.size(), first_nic, nics());
        break;
    case Submission::send: status = add_share(&s, s.to, {.end = 1}); break;
    }
    return status;
}

// Work request `index` of a share.
WorkRequest DomainGroup::work_request(const Share &share, uint64_t index) const
{
    const Submission &s = *share.submission;
    const uint64_t longest = domains[share.nic]->longest_request();
    const MrDesc *remote = &s.remote;
    uint64_t length = s.length, local = s.local_offset, at = s.remote_offset;
    bool last = true; // of those that the immediate follows
    const auto take_piece = [&](Range bytes) {
        const uint64_t begin = bytes.begin + index * longest;
        length = std::min(longest, bytes.end - begin);
        local += begin;
        at += begin;
        last = index + 1 == share.end;
    };
    switch (s.kind) {
    case Submission::single: take_piece(share.bytes); break;
    case Submission::paged:
        local = s.local_pages.offset + s.local_pages.indices[index] * s.local_pages.stride;
        at = s.remote_pages.offset + s.remote_pages.indices[index] * s.remote_pages.stride;
        break;
    case Submission::scatter:
        remote = &s.slices[share.target].dst;
        local = s.slices[share.target].src;
        at = s.slices[share.target].dst_offset;
        take_piece(share.bytes);
        break;
    case Submission::barrier: remote = &s.targets[share.target]; break;
    case Submission::send: break;
    }
    return {.operation = s.operation,
            .has_imm = last && s.imm.has_value(),
            .imm = s.imm.value_or(0),
            .length = static_cast<uint32_t>(length),
            .local = s.region->start + local,
            .local_key = s.region->keys[share.nic].local,
            .remote = remote->rkeys[share.nic].base + at,
            .remote_key = remote->rkeys[share.nic].key,
            .context = reinterpret_cast<uintptr_t>(&share)};
}

// ------------------------------------------------------------------------ the way of a submission

void DomainGroup::start(Submission *submission)
{
    submission->before = nullptr;
    submission->after = under_way;
    if (under_way != nullptr) under_way->before = submission;
    under_way = submission;

    Status status = cut(submission);
    if (!status.ok()) submission->status = std::move(status);
    if (submission->status.ok())
        for (Share &share : submission->shares) { // where they are now, they stay until the end
            share.submission = submission;
            enqueue(&share);
            if (share.peer->first == &share) post(share.peer); // nobody is before it
        }
    end_if_over(submission);
}

void DomainGroup::enqueue(Share *share)
{
    Peer *const peer = share->peer;
    share->queued = true;
    ++share->submission->queued;
    share->before = peer->last;
    share->after = nullptr;
    (peer->last != nullptr ? peer->last->after : peer->first) = share;
    peer->last = share;
    if (!peer->active) active.push_back(peer);
    peer->active = true;
}

void DomainGroup::dequeue(Share *share)
{
    Peer *const peer = share->peer;
    (share->before != nullptr ? share->before->after : peer->first) = share->after;
    (share->after != nullptr ? share->after->before : peer->last) = share->before;
    share->queued = false;
    --share->submission->queued;
}

// Posts what a peer has room for of what waits for it, in the order in which it came. True when something was.
bool DomainGroup::post(Peer *peer)
{
    constexpr size_t most = 16;
    std::array<WorkRequest, most> batch;
    std::array<Share *, most> whose{};
    bool any = false;
    for (;;) {
        size_t count = 0;
        for (Share *share = peer->first; share != nullptr && count < most; share = share->after)
            for (uint64_t index = share->next; index < share->end && count < most; ++index) {
                batch[count] = work_request(*share, index);
                // An immediate stands for all of the share (semantic 4), and no order is assumed: it waits until
                // the other pieces have retired. Each page has its own.
                if (batch[count].has_imm && share->submission->kind != Submission::paged &&
                    (share->in_flight > 0 || index > share->next))
                    break;
                whose[count++] = share;
            }
        const size_t taken = count > 0 ? domains[peer->nic]->post(peer->number, std::span(batch).first(count)) : 0;
        for (size_t i = 0; i < taken; ++i) {
            Share *const share = whose[i];
            ++share->in_flight;
            ++share->submission->in_flight;
            share->submission->posted = true;
            if (++share->next == share->end) dequeue(share);
        }
        work_requests.fetch_add(taken, std::memory_order_relaxed);
        any = any || taken > 0;
        if (taken < most) return any;
    }
}

// The peers take turns, and one that is full or not connected yet holds up nobody else.
bool DomainGroup::post_to_all()
{
    bool any = false;
    const size_t count = active.size();
    for (size_t i = 0; i < count; ++i)
        any |= post(active[(turn + i) % count]);
    ++turn;
    std::erase_if(active, [](Peer *peer) {
        peer->active = peer->first != nullptr;
        return !peer->active;
    });
    return any;
}

// The first reason counts. What was not posted yet is not posted any more.
void DomainGroup::fail(Submission *submission, Status status)
{
    if (!submission->status.ok()) return;
    submission->status = std::move(status);
    for (Share &share : submission->shares)
        if (share.queued) dequeue(&share);
}

void DomainGroup::leave(Submission *submission)
{
    (submission->before != nullptr ? submission->before->after : under_way) = submission->after;
    if (submission->after != nullptr) submission->after->before = submission->before;
}

// Semantic 1: it ends when all its work requests have retired, on every adapter.
void DomainGroup::end_if_over(Submission *submission)
{
    if (submission->queued > 0 || submission->in_flight > 0) return;
    leave(submission);
    Status &status = submission->status;
    status.remote_may_have_changed = !status.ok() && submission->posted && submission->operation == Operation::write;
    events->ended(submission);
}

// ------------------------------------------------------------------------ what the adapters tell

void DomainGroup::retire(const Event &event)
{
    auto *const share = reinterpret_cast<Share *>(event.context); // NOLINT(performance-no-int-to-ptr): work_request()'s
    Submission *const submission = share->submission;
    --share->in_flight;
    --submission->in_flight;
    if (event.code != Code::ok) {
        work_requests_failed.fetch_add(1, std::memory_order_relaxed);
        fail(submission, failure(event.code, event.why));
    }
    end_if_over(submission);
}

void DomainGroup::lose_peer(size_t nic, const Event &event)
{
    auto &known = peers[nic];
    const auto lost =
        std::find_if(known.begin(), known.end(), [&](const auto &entry) { return entry.second->number == event.peer; });
    if (lost == known.end()) return; // it had connected to us, and nothing here has used it
    const std::unique_ptr<Peer> peer = std::move(lost->second);
    known.erase(lost); // who submits from here on connects anew
    std::erase(active, peer.get());
    const Status status = failure(event.code, event.why);
    while (peer->first != nullptr) {
        Submission *const submission = peer->first->submission;
        fail(submission, status);
        end_if_over(submission);
    }
    events->peer_is_down(peer->address, status);
}

void DomainGroup::take(size_t nic, const Event &event)
{
    switch (event.kind) {
    case Event::retired: retire(event); break;
    case Event::immediate: events->immediate(event.imm); break;
    case Event::received: events->received(event.context, event.length, event.code); break;
    case Event::peer_down: lose_peer(nic, event); break;
    }
}

bool DomainGroup::progress()
{
    bool any = post_to_all();
    std::array<Event, 64> batch;
    for (size_t nic = 0; nic < nics(); ++nic) {
        const size_t count = domains[nic]->poll(batch);
        for (size_t i = 0; i < count; ++i)
            take(nic, batch[i]);
        any = any || count > 0;
    }
    return any;
}

// ------------------------------------------------------------------------------ deadlines and the end

void DomainGroup::check_deadlines(Clock::time_point now)
{
    for (Submission *s = under_way, *after = nullptr; s != nullptr; s = after) {
        after = s->after;
        if (now < s->deadline) continue;
        fail(s, failure(Code::timed_out, "its deadline came"));
        if (!s->aborted && s->in_flight > 0 && now - s->deadline >= abort_after) {
            s->aborted = true;
            for (const Share &share : s->shares)
                if (share.in_flight > 0) domains[share.nic]->abort(share.peer->number);
        }
        end_if_over(s);
    }
}

void DomainGroup::cancel_all(const Status &status)
{
    const auto now = Clock::now();
    for (Submission *s = under_way, *after = nullptr; s != nullptr; s = after) {
        after = s->after;
        fail(s, status);
        s->deadline = std::min(s->deadline, now);
        end_if_over(s);
    }
}

bool DomainGroup::is_deaf(Clock::time_point now) const
{
    const auto patience = 2 * abort_after + std::chrono::seconds(1);
    for (const Submission *s = under_way; s != nullptr; s = s->after)
        if (now < s->deadline || now - s->deadline < patience) return false;
    return under_way != nullptr;
}

void DomainGroup::close()
{
    domains.clear();
    while (under_way != nullptr) {
        Submission *const submission = under_way;
        submission->in_flight = 0; // with its adapter
        fail(submission, failure(Code::cancelled, "the adapter was closed"));
        end_if_over(submission);
    }
}

} // namespace transfer_engine
