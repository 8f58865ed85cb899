// te_bench: what the engine costs. Each figure is measured with the engine and with a bare loop on the same provider,
// in turns, in one run; the ratio is the median of those of the pairs. Beside them, where they are installed,
// ucx_perftest and ib_write_bw.
#include "contestant.hpp"
#include "other_tools.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <getopt.h>
#include <unistd.h>

using namespace bench;

namespace
{

struct Arguments {
    std::string nic = "ofi:tcp;ofi_rxm";
    bool quick = false;
    std::string only; // in the name of a figure
    int pairs = 15;
    uint64_t depth = 16;
    uint64_t peers = 2;
    const char *csv = nullptr;
};

void print_usage(FILE *stream)
{
    fputs("usage: te_bench [options]\n"
          "Compares the engine with a bare loop on libfabric or libibverbs, in turns.\n\n"
          "  --nic NIC     ofi:PROVIDER or verbs:DEVICE (default ofi:tcp;ofi_rxm)\n"
          "  --depth N     single operations under way (default 16)\n"
          "  --peers N     processes that scatters and barriers go to (default 2)\n"
          "  --pairs N     measurements of each (default 15)\n"
          "  --quick       5 pairs, and some of the sizes\n"
          "  --only TEXT   the figures whose names have it, and no other tool\n"
          "  --csv FILE    a row for each measurement\n"
          "  -h, --help    this text\n",
          stream);
}

[[noreturn]] void give_up(const std::string &what)
{
    fprintf(stderr, "te_bench: %s\n", what.c_str());
    exit(EXIT_FAILURE);
}

uint64_t parse_number(const char *option, const char *text, uint64_t most)
{
    char *end = nullptr;
    errno = 0;
    const uint64_t number = strtoull(text, &end, 10);
    if (errno != 0 || *text < '0' || *text > '9' || *end != '\0' || number < 1 || number > most)
        give_up(std::string(option) + " " + text + ": not a number from 1 to " + std::to_string(most));
    return number;
}

Arguments parse_arguments(int argc, char **argv)
{
    static const option options[] = {{"nic", required_argument, nullptr, 'n'},
                                     {"depth", required_argument, nullptr, 'd'},
                                     {"peers", required_argument, nullptr, 'p'},
                                     {"pairs", required_argument, nullptr, 'r'},
                                     {"quick", no_argument, nullptr, 'q'},
                                     {"csv", required_argument, nullptr, 'c'},
                                     {"only", required_argument, nullptr, 'o'},
                                     {"help", no_argument, nullptr, 'h'},
                                     {nullptr, 0, nullptr, 0}};
    Arguments arguments;
    bool pairs_given = false;
    for (int letter; (letter = getopt_long(argc, argv, "h", options, nullptr)) != -1;) {
        switch (letter) {
        case 'n': arguments.nic = optarg; break;
        case 'd': arguments.depth = parse_number("--depth", optarg, 256); break;
        case 'p': arguments.peers = parse_number("--peers", optarg, 64); break;
        case 'r':
            arguments.pairs = static_cast<int>(parse_number("--pairs", optarg, 1000));
            pairs_given = true;
            break;
        case 'q': arguments.quick = true; break;
        case 'o': arguments.only = optarg; break;
        case 'c': arguments.csv = optarg; break;
        case 'h': print_usage(stdout); exit(EXIT_SUCCESS);
        default: print_usage(stderr); exit(2);
        }
    }
    if (optind < argc) give_up(std::string("unexpected argument '") + argv[optind] + "'");
    if (arguments.quick && !pairs_given) arguments.pairs = 5;
    return arguments;
}

// What is done, in what unit it is told.
struct Figure {
    std::string name;
    const char *unit;
    Task task;

    double value(const Result &result) const
    {
        const bool is_time = strcmp(unit, "us") == 0 || strcmp(unit, "ns") == 0;
        if (is_time) return result.percentiles[0] * (unit[0] == 'u' ? 1e6 : 1e9);
        return static_cast<double>(task.length * operations()) * 8 / 1e9 / result.seconds;
    }
    // Whether one operation was timed at a time.
    bool has_percentiles() const { return task.kind != Task::window && task.kind != Task::pages; }
    uint64_t operations() const { return task.kind == Task::scatter ? task.count * task.depth : task.count; }
};

std::string size_text(uint64_t bytes)
{
    if (bytes < 1024) return std::to_string(bytes) + " B";
    return bytes < 1 << 20 ? std::to_string(bytes >> 10) + " KiB" : std::to_string(bytes >> 20) + " MiB";
}

std::vector<Figure> choose_figures(const Arguments &arguments)
{
    using Sizes = std::vector<uint64_t>;
    const bool quick = arguments.quick;
    const Sizes singles = quick ? Sizes{16, 64, 1024, 8192} : Sizes{16, 64, 256, 1024, 4096, 8192, 32768};
    const Sizes paged = quick ? Sizes{4, 18, 32} : Sizes{1, 4, 8, 16, 18, 32, 64};
    constexpr uint64_t pages_depth = 256;          // of the bare loop
    constexpr uint64_t slices = 16, slice = 16384; // of a scatter
    constexpr uint64_t moved = 128 << 20;          // by a measurement of bandwidth
    std::vector<Figure> all;
    for (const bool read : {false, true}) {
        const std::string verb = read ? "read" : "write";
        for (const uint64_t length : {uint64_t{8}, uint64_t{65536}})
            all.push_back({"single " + verb + " of " + size_text(length),
                           "us",
                           {.kind = Task::one_at_a_time, .read = read, .length = length, .count = 2000}});
        for (const uint64_t kib : singles)
            all.push_back({verb + "s of " + size_text(kib << 10) + " at depth " + std::to_string(arguments.depth),
                           "Gb/s",
                           {.kind = Task::window,
                            .read = read,
                            .length = kib << 10,
                            .count = std::max<uint64_t>(moved / (kib << 10), 16),
                            .depth = arguments.depth}});
        for (const uint64_t kib : paged)
            for (const uint64_t count : kib == 4 ? Sizes{100, 10000, 40960} : Sizes{100, 10000})
                all.push_back(
                    {verb + " of " + std::to_string(count) + " pages of " + size_text(kib << 10),
                     "Gb/s",
                     {.kind = Task::pages, .read = read, .length = kib << 10, .count = count, .depth = pages_depth}});
    }
    const std::string to_peers = " to " + std::to_string(arguments.peers) + " peers";
    all.push_back({"scatter of " + std::to_string(slices) + " x " + size_text(slice) + to_peers,
                   "us",
                   {.kind = Task::scatter, .length = slice, .count = 500, .depth = slices}});
    all.push_back({"barrier" + to_peers, "us", {.kind = Task::barrier, .length = 8, .count = 1000}});
    all.push_back({"what a submit takes its caller",
                   "ns",
                   {.kind = Task::submit, .length = 8, .count = 4000, .depth = arguments.depth}});
    return all;
}

double median(std::vector<double> values)
{
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// The results of one contestant, a pair each.
struct Series {
    std::vector<double> values, cpu_us; // `cpu_us`: of an operation
    std::array<std::vector<double>, 3> percentiles_us;

    void add(const Figure &figure, const Result &result)
    {
        values.push_back(figure.value(result));
        cpu_us.push_back(result.cpu_seconds * 1e6 / static_cast<double>(figure.operations()));
        for (size_t i = 0; i < percentiles_us.size(); ++i)
            percentiles_us[i].push_back(result.percentiles[i] * 1e6);
    }
};

class Report
{
public:
    explicit Report(const char *path)
    {
        if (path == nullptr) return;
        csv = fopen(path, "we");
        if (csv == nullptr) give_up(std::string("--csv ") + path + ": " + strerror(errno));
        fputs("figure,unit,contestant,pair,value,cpu_us_per_operation,p50_us,p99_us,p99.9_us\n", csv);
    }
    ~Report()
    {
        if (csv != nullptr) fclose(csv);
    }
    Report(const Report &) = delete;
    Report &operator=(const Report &) = delete;

    static void head()
    {
        printf("%-36s %10s %10s %-5s %7s %9s %9s   %s\n", "", "engine", "bare", "", "ratio", "CPU us", "bare",
               "engine's p50/p99/p99.9, us");
    }

    // Without a bare loop's results where that has none.
    void row(const Figure &figure, const Series &engine, const Series *bare)
    {
        write_csv(figure, "engine", engine);
        printf("%-36s %10.3f ", figure.name.c_str(), median(engine.values));
        if (bare != nullptr) {
            write_csv(figure, "bare", *bare);
            std::vector<double> ratios;
            for (size_t pair = 0; pair < engine.values.size(); ++pair)
                ratios.push_back(engine.values[pair] / bare->values[pair]);
            printf("%10.3f %-5s %7.2f %9.2f %9.2f", median(bare->values), figure.unit, median(ratios),
                   median(engine.cpu_us), median(bare->cpu_us));
        } else {
            printf("%10s %-5s %7s %9.2f %9s", "", figure.unit, "", median(engine.cpu_us), "");
        }
        const auto &p = engine.percentiles_us;
        if (figure.has_percentiles()) printf("   %.1f / %.1f / %.1f", median(p[0]), median(p[1]), median(p[2]));
        puts("");
        fflush(stdout);
    }

private:
    void write_csv(const Figure &figure, const char *contestant, const Series &series)
    {
        if (csv == nullptr) return;
        for (size_t pair = 0; pair < series.values.size(); ++pair) {
            fprintf(csv, "%s,%s,%s,%zu,%.6f,%.6f", figure.name.c_str(), figure.unit, contestant, pair,
                    series.values[pair], series.cpu_us[pair]);
            for (const auto &percentile : series.percentiles_us)
                figure.has_percentiles() ? fprintf(csv, ",%.3f", percentile[pair]) : fputs(",", csv);
            fputs("\n", csv);
        }
    }

    FILE *csv = nullptr;
};

void show_progress(const std::string &what)
{
    if (isatty(STDERR_FILENO) != 0) fprintf(stderr, "\r\033[K%s", what.c_str());
}

// In turns, the first of a pair alternately the one and the other. Not by the bare loop what that cannot do.
void compare(const Figure &figure, Contestant *engine, Contestant *bare, int pairs, Report *report)
{
    const bool both = figure.task.kind != Task::barrier && figure.task.kind != Task::submit;
    Series engines, bares;
    for (int pair = -1; pair < pairs; ++pair) { // the first is not counted: it warms
        show_progress(figure.name + ", " + std::to_string(pair + 1) + " of " + std::to_string(pairs));
        for (const bool is_engine : {pair % 2 == 0, pair % 2 != 0}) {
            if (!is_engine && !both) continue;
            const Result result = (is_engine ? engine : bare)->run(figure.task);
            if (pair >= 0) (is_engine ? engines : bares).add(figure, result);
        }
    }
    show_progress("");
    report->row(figure, engines, both ? &bares : nullptr);
}

// In turns as well.
void compare_with(const Tool &tool, Contestant *engine, int pairs)
{
    const Figure figure{
        "", "Gb/s", {.kind = Task::window, .length = tool.length, .count = tool.count, .depth = tool.depth}};
    std::vector<double> engines, tools, ratios;
    for (int pair = 0; pair < pairs; ++pair) {
        show_progress(tool.name + ", " + std::to_string(pair + 1) + " of " + std::to_string(pairs));
        engines.push_back(figure.value(engine->run(figure.task)));
        tools.push_back(run(tool));
        ratios.push_back(engines.back() / tools.back());
    }
    show_progress("");
    printf("\nwrites of %s, depth %ju: engine %.3f Gb/s, %s %.3f Gb/s, ratio %.2f\n", size_text(tool.length).c_str(),
           static_cast<uintmax_t>(tool.depth), median(engines), tool.name.c_str(), median(tools), median(ratios));
}

} // namespace

int main(int argc, char **argv)
try {
    const Arguments arguments = parse_arguments(argc, argv);
    const size_t colon = arguments.nic.find(':');
    const bool verbs = arguments.nic.starts_with("verbs:");
    if (!verbs && !arguments.nic.starts_with("ofi:")) give_up("--nic " + arguments.nic + ": not ofi:... or verbs:...");
    const std::string name = arguments.nic.substr(colon + 1);

    std::vector<Figure> figures = choose_figures(arguments);
    std::erase_if(figures, [&](const Figure &figure) { return figure.name.find(arguments.only) == std::string::npos; });
    if (figures.empty()) give_up("--only " + arguments.only + ": no figure has that in its name");

    Contestant engine([&](std::span<uint8_t> memory, size_t peers,
                          int core) { return engine_side(arguments.nic, memory, peers, core); },
                      arguments.peers);
    Contestant bare(
        [&](std::span<uint8_t> memory, size_t peers, int core) {
            return verbs ? bare_verbs_side(name, memory, peers, core) : bare_ofi_side(name, memory, peers, core);
        },
        arguments.peers);

    printf(
        "%s, %d pairs, median; %ld processors here. CPU: of an operation, all threads of the process that begins it, "
        "spinning included.\n\n",
        arguments.nic.c_str(), arguments.pairs, sysconf(_SC_NPROCESSORS_ONLN));
    Report report(arguments.csv);
    Report::head();
    for (const Figure &figure : figures)
        compare(figure, &engine, &bare, arguments.pairs, &report);
    if (const auto tool = tool_for(arguments.nic); tool && arguments.only.empty())
        compare_with(*tool, &engine, arguments.pairs);
    return EXIT_SUCCESS;
} catch (const std::exception &error) {
    give_up(error.what());
}
