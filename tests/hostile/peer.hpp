// peer.hpp: what hostile_reader and hostile_server share: their dice, and connections that end abruptly.
#pragma once

#include <poll.h>

#include <random>

#include "../../common.hpp"

using random_bits = std::mt19937_64;

// For one case: it can be repeated without those before it.
inline random_bits dice_of(uint64_t seed, uint64_t number)
{
    std::seed_seq both{seed, number};
    return random_bits(both);
}

inline uint64_t below(random_bits *dice, uint64_t end) { return (*dice)() % end; }

inline void fill(random_bits *dice, void *bytes, size_t length)
{
    for (size_t i = 0; i < length; ++i)
        static_cast<uint8_t *>(bytes)[i] = static_cast<uint8_t>((*dice)());
}

inline void sleep_us(uint64_t microseconds) { usleep(static_cast<useconds_t>(microseconds)); }

// A queue pair and its connection. Its end is abrupt; leave() is the polite one. A plain structure but for that
// it ends with its scope.
// NOLINTBEGIN(misc-non-private-member-variables-in-classes)
struct connection {
    rdma_event_channel *channel = nullptr;
    rdma_cm_id *id = nullptr;
    ibv_cq *cq = nullptr;
    offer cache{};

    connection() = default;
    connection(const connection &) = delete;
    connection &operator=(const connection &) = delete;
    ~connection() { vanish(); }
    void vanish()
    {
        if (id != nullptr && id->qp != nullptr) rdma_destroy_qp(id);
        if (id != nullptr) rdma_destroy_id(id);
        if (cq != nullptr) ibv_destroy_cq(cq);
        if (channel != nullptr) rdma_destroy_event_channel(channel);
        id = nullptr, cq = nullptr, channel = nullptr;
    }
};
// NOLINTEND(misc-non-private-member-variables-in-classes)

// An event of the connection manager, copied: what it points to is gone with its acknowledgement.
struct event {
    bool came;
    rdma_cm_event_type type;
    int status;
    uint8_t data[256];
    size_t length;
    rdma_cm_id *id;
};

inline event wait_for_event(rdma_event_channel *channel, int milliseconds)
{
    event result{};
    pollfd ready{.fd = channel->fd, .events = POLLIN, .revents = 0};
    rdma_cm_event *got = nullptr;
    if (poll(&ready, 1, milliseconds) <= 0 || rdma_get_cm_event(channel, &got) != 0) return result;
    result.came = true;
    result.type = got->event;
    result.status = got->status;
    result.id = got->id;
    if (got->param.conn.private_data != nullptr) {
        result.length = got->param.conn.private_data_len;
        memcpy(result.data, got->param.conn.private_data, result.length);
    }
    rdma_ack_cm_event(got);
    return result;
}

inline bool is(const event &e, rdma_cm_event_type type) { return e.came && e.type == type; }

inline std::string text_of(const event &e)
{
    return e.came ? text("%s (status %d)", rdma_event_str(e.type), e.status) : "no answer";
}
