// Schedules: groups of adapters that do what they may (test_domain.hpp), driven by one thread in an order drawn by a
// seed. Whatever the order: each submission ends once, only then does nobody use its memory, what arrived is
// right, nothing else was touched, and the immediates are as many as sharding.hpp says.
//
// TE_SEED=N runs one schedule, TE_SCHEDULES=N so many (default 10,000).
#include "../domain_group.hpp"
#include "test_domain.hpp"

#include <gtest/gtest.h>

using namespace transfer_engine;
using namespace transfer_engine::testing;

namespace
{

constexpr size_t half = 48 << 10; // of a node's memory: sources, then destinations; 12 plans of 3,900 bytes fit
constexpr uint8_t untouched = 0xee;
constexpr auto abort_after = std::chrono::milliseconds(50);

// The byte that belongs at an offset of a node's sources. Never `untouched`, never the 0 that ended sources are filled
// with.
uint8_t pattern(size_t node, uint64_t offset)
{
    const uint64_t mixed = (offset + 1) * 0x9e3779b97f4a7c15u + node * 0xbf58476d1ce4e5b9u;
    return static_cast<uint8_t>(1 + (mixed >> 40) % 200);
}

// A piece of memory that is to arrive.
struct Piece {
    size_t from = 0, to = 0;   // nodes
    uint64_t src = 0, dst = 0; // offsets in their memory
    uint64_t length = 0;
};

struct Planned {
    Submission submission;
    std::vector<Piece> pieces;
    size_t node = 0;                                // that submits it
    std::map<size_t, uint64_t> immediates, arrived; // by node
    int ended = 0;
    Status status;
    bool remote_may_have_changed = false;
};

class Schedule;

class Node final : public GroupEvents
{
public:
    Node(Schedule *of, size_t index, size_t nics, TestDomainOptions options);
    ~Node() override;
    Node(const Node &) = delete;
    Node &operator=(const Node &) = delete;

    void ended(Submission *submission) override;
    void immediate(uint32_t imm) override;
    void received(uint64_t context, uint64_t length, Code code) override;
    void peer_is_down(const NetAddr &, const Status &) override {}
    void post_receive(uint64_t slot)
    {
        EXPECT_TRUE(group->nic(0).post_receive(&messages[slot * 64], 64, keys_of_messages[0].local, slot));
    }

    Schedule *schedule;
    size_t number;
    std::vector<uint8_t> memory, messages;
    uint64_t next_source = 0, next_destination = half;
    std::unique_ptr<DomainGroup> group;
    Region region;
    std::array<MemoryKeys, most_nics> keys_of_messages{};
    MrDesc description;
    std::multiset<std::string> got; // messages
};

class Schedule
{
public:
    Schedule(uint64_t seed, Faults faults) : wire(seed, faults)
    {
        nics = wire.below(4) + 1;
        const std::array<uint64_t, 4> lengths{64, 1000, 4096, 1 << 20};
        const TestDomainOptions options{.longest = lengths.at(wire.below(4)),
                                        .depth = wire.below(64) + 1,
                                        .receives = 64,
                                        .virtual_addresses = wire.chance(0.5)};
        for (size_t count = wire.below(3) + 2; nodes.size() < count;)
            nodes.push_back(std::make_unique<Node>(this, nodes.size(), nics, options));
        longest = options.longest;
    }

    void run();

    Wire wire;
    size_t nics = 1;
    uint64_t longest = 0;
    std::vector<std::unique_ptr<Node>> nodes;
    std::deque<Planned> plans;
    Clock::time_point now = Clock::time_point() + std::chrono::hours(1);

    bool all_arrived(const Planned &plan) const;

private:
    void plan_one();
    void plan_single(Planned *plan, Node *there);
    void plan_paged(Planned *plan, Node *there);
    void plan_scatter(Planned *plan);
    void plan_send(Planned *plan, Node *there);
    Piece piece(const Planned &plan, size_t other, uint64_t length, uint64_t gap = 0);
    void check();
};

Node::Node(Schedule *of, size_t index, size_t nics, TestDomainOptions options)
    : schedule(of), number(index), memory(2 * half, untouched), messages(64ul * 64)
{
    std::vector<std::unique_ptr<Domain>> domains;
    for (size_t i = 0; i < nics; ++i)
        domains.push_back(std::make_unique<TestDomain>(&of->wire, options));
    group = std::make_unique<DomainGroup>(std::move(domains), this, abort_after);
    region.start = memory.data();
    region.length = memory.size();
    description = {.ptr = reinterpret_cast<uintptr_t>(memory.data()),
                   .length = memory.size(),
                   .nics = static_cast<uint32_t>(nics),
                   .rkeys = {}};
    for (size_t i = 0; i < nics; ++i) {
        EXPECT_TRUE(group->nic(i).register_memory(memory.data(), memory.size(), host, &region.keys[i]).ok());
        EXPECT_TRUE(group->nic(i).register_memory(messages.data(), messages.size(), host, &keys_of_messages[i]).ok());
        description.rkeys[i] = {
            .address = group->nic(i).address(), .base = region.keys[i].base, .key = region.keys[i].remote};
    }
    for (uint64_t offset = 0; offset < half; ++offset)
        memory[offset] = pattern(number, offset);
    for (uint64_t slot = 0; slot < 64; ++slot)
        post_receive(slot);
}

Node::~Node()
{
    for (size_t i = 0; i < group->nics(); ++i) {
        group->nic(i).deregister_memory(region.keys[i]);
        group->nic(i).deregister_memory(keys_of_messages[i]);
    }
}

// From here on nobody may use its memory: it is overwritten.
void Node::ended(Submission *submission)
{
    for (Planned &plan : schedule->plans) {
        if (&plan.submission != submission) continue;
        ++plan.ended;
        plan.status = submission->status;
        plan.remote_may_have_changed = submission->status.remote_may_have_changed;
        EXPECT_TRUE(!plan.status.ok() || schedule->all_arrived(plan));
        if (submission->operation != Operation::read)
            for (const Piece &piece : plan.pieces)
                memset(&memory[piece.src], 0, piece.length);
        return;
    }
    ADD_FAILURE() << "ended: what nobody submitted";
}

// Immediate number i is that of submission i.
void Node::immediate(uint32_t imm)
{
    ASSERT_LT(imm, schedule->plans.size());
    Planned &plan = schedule->plans[imm];
    ++plan.arrived[number];
    ASSERT_LE(plan.arrived[number], plan.immediates[number]) << "an immediate too many";
    if (plan.arrived[number] < plan.immediates[number]) return;
    for (const Piece &piece : plan.pieces) // semantic 4: all of it is here
        for (uint64_t i = 0; piece.to == number && i < piece.length; ++i)
            ASSERT_EQ(memory[piece.dst + i], pattern(piece.from, piece.src + i)) << "told before it was there";
}

void Node::received(uint64_t context, uint64_t length, Code code)
{
    if (code == Code::ok) got.emplace(reinterpret_cast<const char *>(&messages[context * 64]), length);
    post_receive(context);
}

bool Schedule::all_arrived(const Planned &plan) const
{
    for (const Piece &piece : plan.pieces)
        for (uint64_t i = 0; i < piece.length; ++i)
            if (nodes[piece.to]->memory[piece.dst + i] != pattern(piece.from, piece.src + i)) return false;
    return true;
}

// Memory that no other piece has, at this plan's node and another.
Piece Schedule::piece(const Planned &plan, size_t other, uint64_t length, uint64_t gap)
{
    const bool reads = plan.submission.operation == Operation::read;
    Piece made{.from = reads ? other : plan.node, .to = reads ? plan.node : other, .length = length};
    Node &from = *nodes[made.from], &to = *nodes[made.to];
    made.src = from.next_source;
    made.dst = to.next_destination;
    from.next_source += length + gap;
    to.next_destination += length + gap;
    return made;
}

void Schedule::plan_single(Planned *plan, Node *there)
{
    Submission &s = plan->submission;
    s.kind = Submission::single;
    s.length = wire.below(3) == 0 ? wire.below(9) : wire.below(3000);
    s.remote = there->description;
    const Piece made = piece(*plan, there->number, s.length, wire.below(3));
    const bool reads = s.operation == Operation::read;
    s.local_offset = reads ? made.dst : made.src;
    s.remote_offset = reads ? made.src : made.dst;
    plan->pieces.push_back(made);
    if (s.imm) plan->immediates[there->number] += imm_count(Transfer::single_write, 1, nics);
}

void Schedule::plan_paged(Planned *plan, Node *there)
{
    Submission &s = plan->submission;
    s.kind = Submission::paged;
    s.length = std::min(wire.below(150), longest);
    s.remote = there->description;
    const uint64_t pages = wire.below(25);
    s.local_pages.stride = s.length + wire.below(5);
    s.remote_pages.stride = s.length + wire.below(5);
    const bool reads = s.operation == Operation::read;
    Node &from = reads ? *there : *nodes[plan->node], &to = reads ? *nodes[plan->node] : *there;
    Pages &src = reads ? s.remote_pages : s.local_pages, &dst = reads ? s.local_pages : s.remote_pages;
    src.offset = from.next_source;
    dst.offset = to.next_destination;
    for (uint32_t i = 0; i < pages; ++i) {
        src.indices.push_back(i);
        dst.indices.push_back(i);
    }
    std::shuffle(src.indices.begin(), src.indices.end(), wire.random);
    std::shuffle(dst.indices.begin(), dst.indices.end(), wire.random);
    for (uint64_t i = 0; i < pages; ++i)
        plan->pieces.push_back({.from = from.number,
                                .to = to.number,
                                .src = src.offset + src.indices[i] * src.stride,
                                .dst = dst.offset + dst.indices[i] * dst.stride,
                                .length = s.length});
    from.next_source += pages * src.stride;
    to.next_destination += pages * dst.stride;
    if (s.imm && pages > 0) plan->immediates[there->number] += imm_count(Transfer::paged_writes, pages, nics);
}

void Schedule::plan_scatter(Planned *plan)
{
    Submission &s = plan->submission;
    const bool barrier = wire.chance(0.4);
    s.kind = barrier ? Submission::barrier : Submission::scatter;
    s.operation = Operation::write;
    if (barrier) s.imm = static_cast<uint32_t>(plans.size() - 1);
    for (uint64_t targets = wire.below(6); targets > 0; --targets) {
        Node &there = *nodes[wire.below(nodes.size())];
        if (s.imm)
            plan->immediates[there.number] += imm_count(barrier ? Transfer::barrier : Transfer::scatter, 1, nics);
        if (barrier) {
            s.targets.push_back(there.description);
            continue;
        }
        const Piece made = piece(*plan, there.number, wire.below(700));
        s.slices.push_back({.length = made.length, .src = made.src, .dst = there.description, .dst_offset = made.dst});
        plan->pieces.push_back(made);
    }
}

void Schedule::plan_send(Planned *plan, Node *there)
{
    Submission &s = plan->submission;
    s.kind = Submission::send;
    s.operation = Operation::send;
    s.imm.reset();
    s.length = wire.below(60);
    s.local_offset = nodes[plan->node]->next_source;
    nodes[plan->node]->next_source += s.length;
    s.to = there->description.rkeys[0].address;
}

void Schedule::plan_one()
{
    Planned &plan = plans.emplace_back();
    Submission &s = plan.submission;
    plan.node = wire.below(nodes.size());
    s.region = &nodes[plan.node]->region;
    s.deadline = now + std::chrono::milliseconds(wire.faults.keeps > 0 ? wire.below(300) : 1000000);
    s.operation = wire.chance(0.3) ? Operation::read : Operation::write;
    if (s.operation == Operation::write && wire.chance(0.7)) s.imm = static_cast<uint32_t>(plans.size() - 1);
    Node &there = *nodes[wire.below(nodes.size())];
    switch (wire.below(4)) {
    case 0: plan_single(&plan, &there); break;
    case 1: plan_paged(&plan, &there); break;
    case 2: plan_scatter(&plan); break;
    default: plan_send(&plan, &there);
    }
    nodes[plan.node]->group->start(&s);
}

void Schedule::check()
{
    EXPECT_EQ(wire.violations, std::vector<std::string>());
    std::vector<std::vector<bool>> may_differ(nodes.size(), std::vector<bool>(half, false));
    uint64_t messages_sent = 0, messages_got = 0;
    for (const Planned &plan : plans) {
        EXPECT_EQ(plan.ended, 1);
        EXPECT_TRUE(plan.status.ok() || wire.faults.fails + wire.faults.keeps > 0) << plan.status.message;
        const bool reads = plan.submission.operation == Operation::read;
        EXPECT_TRUE(!plan.status.ok() || plan.arrived == plan.immediates);
        if (plan.submission.kind == Submission::send) messages_sent += plan.status.ok() ? 1 : 0;
        EXPECT_FALSE(plan.status.ok() && plan.remote_may_have_changed);
        for (const Piece &piece : plan.pieces)
            for (uint64_t i = 0; i < piece.length; ++i) {
                may_differ[piece.to][piece.dst + i - half] = true;
                const uint8_t is = nodes[piece.to]->memory[piece.dst + i];
                const bool right = is == pattern(piece.from, piece.src + i);
                ASSERT_TRUE(plan.status.ok() ? right : right || is == untouched) << "a byte that is neither";
                ASSERT_TRUE(!right || plan.status.ok() || reads || plan.remote_may_have_changed);
            }
    }
    for (const auto &node : nodes) {
        messages_got += node->got.size();
        for (uint64_t i = 0; i < half; ++i)
            ASSERT_TRUE(may_differ[node->number][i] || node->memory[half + i] == untouched) << "a byte beyond";
    }
    EXPECT_TRUE(wire.faults.loses_message > 0 || wire.faults.fails > 0 || messages_got >= messages_sent);
}

void Schedule::run()
{
    constexpr unsigned enough = 200000;
    size_t to_plan = wire.below(12) + 1;
    const auto all_ended = [&] {
        return std::all_of(plans.begin(), plans.end(), [](const Planned &plan) { return plan.ended > 0; });
    };
    unsigned steps = 0;
    for (; (to_plan > 0 || !all_ended()) && steps < enough; ++steps) {
        if (to_plan > 0 && wire.chance(0.2)) {
            --to_plan;
            plan_one();
        }
        nodes[wire.below(nodes.size())]->group->progress();
        now += std::chrono::milliseconds(1);
        if (wire.chance(0.05)) nodes[wire.below(nodes.size())]->group->check_deadlines(now);
        if (wire.faults.breaks > 0 && wire.chance(0.002)) {
            Node &lonely = *nodes[wire.below(nodes.size())];
            static_cast<TestDomain &>(lonely.group->nic(0)).lose(nodes[0]->description.rkeys[0].address);
        }
    }
    ASSERT_LT(steps, enough) << "something never ends";
    for (int rest = 0; rest < 100; ++rest) // immediates and messages may come after the writer knows
        for (const auto &node : nodes)
            node->group->progress();
    for (const auto &node : nodes)
        EXPECT_TRUE(node->group->idle());
    check();
}

uint64_t number_from(const char *variable, uint64_t otherwise)
{
    const char *text = getenv(variable); // NOLINT(concurrency-mt-unsafe): one thread
    return text == nullptr ? otherwise : strtoull(text, nullptr, 10);
}

// Five kinds of weather, the first without a failure.
Faults weather(uint64_t seed)
{
    switch (seed % 5) {
    case 1: return {.fails = 0.02};
    case 2: return {.fails = 0.05, .breaks = 0.5};
    case 3: return {.keeps = 0.05};
    case 4: return {.fails = 0.01, .breaks = 0.2, .keeps = 0.02, .loses_message = 0.1};
    default: return {};
    }
}

TEST(DomainGroup, Schedules)
{
    const uint64_t only = number_from("TE_SEED", 0), count = number_from("TE_SCHEDULES", 10000);
    for (uint64_t seed = only != 0 ? only : 1; seed <= (only != 0 ? only : count); ++seed) {
        Schedule schedule(seed, weather(seed));
        schedule.run();
        ASSERT_FALSE(::testing::Test::HasFailure()) << "TE_SEED=" << seed;
    }
}

} // namespace
