// status.cpp: the codes of a Status, as words.
#include "transfer_engine.hpp"

namespace transfer_engine
{

const char *name_of(Code code)
{
    switch (code) {
    case Code::ok: return "ok";
    case Code::invalid: return "invalid";
    case Code::full: return "full";
    case Code::unsupported: return "unsupported";
    case Code::timed_out: return "timed_out";
    case Code::cancelled: return "cancelled";
    case Code::peer_down: return "peer_down";
    case Code::failed: return "failed";
    case Code::stopped: return "stopped";
    }
    return "unknown";
}

} // namespace transfer_engine
