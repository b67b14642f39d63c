//! Who runs in a row: ours, the floor, and the tools of rdma-core and perftest with the options that come closest.
//!
//! A tool that cannot do what the row asks stays in it with the reason; the table then says so instead of leaving a gap.

use std::time::Duration;

use rdma_bench::record::{FLOOR_WATCHING, Figures, OURS_CM};
use rdma_bench::spec::{Mode, Op, Wait};

use crate::Options;
use crate::case::Case;
use crate::pair::{Commands, Finished, Ready};

/// A program in a row.
pub(crate) struct Contender {
    pub(crate) name: &'static str,
    pub(crate) ready: Ready,
    pub(crate) commands: Result<Commands, &'static str>,
    pub(crate) parse: fn(&Finished, &Case) -> Option<Figures>,
    /// The server is killed after so long, and the client timed from then on.
    pub(crate) killed_after: Option<Duration>,
}

/// All programs of a row, ours and the floor first.
pub(crate) fn contenders(options: &Options, case: &Case) -> Vec<Contender> {
    let mut list = Vec::new();
    if let Some(program) = &options.ours {
        let program = program.to_string_lossy();
        list.push(ours(&program, options, case));
        if case.mode == Mode::Connect {
            list.push(with_cm(&program, options, case));
        }
    }
    let floor = options.floor.to_string_lossy();
    list.push(own("floor", &floor, options, case));
    if case.mode == Mode::Latency && case.wait == Wait::Event {
        let watching = Case {
            wait: Wait::Watch,
            ..*case
        };
        list.push(own(FLOOR_WATCHING, &floor, options, &watching));
    }
    list.extend(peers(options, case));
    list
}

fn ours(program: &str, options: &Options, case: &Case) -> Contender {
    if case.signal > case.batch {
        return unavailable(
            "ours",
            "rdma-msg signals every operation that is posted by itself, and the last of a batch",
        );
    }
    own("ours", program, options, case)
}

/// Without rdma-msg, its server aside.
fn with_cm(program: &str, options: &Options, case: &Case) -> Contender {
    let mut contender = own(OURS_CM, program, options, case);
    if let Ok(commands) = &mut contender.commands {
        commands.client.push("--cm".to_owned());
    }
    contender
}

/// Our program and the floor take the same options and print the same JSON.
pub(crate) fn own(name: &'static str, program: &str, options: &Options, case: &Case) -> Contender {
    let (server, client) = (options.server.to_string(), options.client.to_string());
    let commands = Commands {
        server: words(program)
            .and(&["server", "--bind", &server, "--port", "{port}"])
            .and(&case.args()),
        client: words(program)
            .and(&["client", "--bind", &client, "--peer", &server])
            .and(&["--port", "{port}"])
            .and(&case.args()),
    };
    Contender {
        name,
        ready: Ready::SaysSo,
        commands: Ok(commands),
        parse: json,
        killed_after: None,
    }
}

fn peers(options: &Options, case: &Case) -> Vec<Contender> {
    match (case.mode, case.op) {
        (Mode::Latency, Op::Send) => vec![
            ibv_rc_pingpong(options, case),
            perftest("ib_send_lat", options, case, half_latency),
            rstream(options, case),
            tcp(options, case),
        ],
        (Mode::Latency, Op::Write) => vec![ib_write_bw(options, case)],
        (Mode::Latency, Op::Read) if case.size == 64 => vec![
            perftest("ib_read_lat", options, case, latency),
            rping(options, case),
        ],
        (Mode::Latency, Op::Read) => vec![perftest("ib_read_lat", options, case, latency)],
        (Mode::Latency, Op::Cas | Op::Faa) => {
            vec![perftest("ib_atomic_lat", options, case, latency)]
        }
        (_, Op::WriteImm) => vec![unavailable(
            "ib_write_lat",
            "perftest 4.5 has no --write_with_imm",
        )],
        (Mode::Rate, Op::Send) => vec![
            perftest("ib_send_bw", options, case, rate),
            rstream(options, case),
            tcp(options, case),
        ],
        (Mode::Rate, Op::Write) => vec![ib_write_bw(options, case), riostream(options, case)],
        (Mode::Rate, Op::Read) => vec![perftest("ib_read_bw", options, case, rate)],
        (Mode::Rate, Op::Cas | Op::Faa) => vec![perftest("ib_atomic_bw", options, case, rate)],
        (Mode::Connect, _) => vec![cmtime(options, case)],
        (Mode::Truth, _) => vec![killed_ib_write_bw(options, case)],
    }
}

fn unavailable(name: &'static str, reason: &'static str) -> Contender {
    Contender {
        name,
        ready: Ready::AfterAWhile,
        commands: Err(reason),
        parse: json,
        killed_after: None,
    }
}

/// One program on both sides; the client gets the server's address at the end.
fn symmetric(
    name: &'static str,
    options: &Options,
    shared: &Words,
    device_flag: &str,
    parse: fn(&Finished, &Case) -> Option<Figures>,
) -> Contender {
    let server = words(name)
        .and(&[device_flag, &options.server_dev])
        .and(shared);
    let client = words(name)
        .and(&[device_flag, &options.client_dev])
        .and(shared)
        .and(&[options.server.to_string()]);
    Contender {
        name,
        ready: Ready::TcpPort,
        commands: Ok(Commands { server, client }),
        parse,
        killed_after: None,
    }
}

fn ibv_rc_pingpong(options: &Options, case: &Case) -> Contender {
    if case.wait == Wait::Hybrid {
        return unavailable("ibv_rc_pingpong", "either sleeps or polls");
    }
    let mut shared = words("-g")
        .and(&["1", "-m", "4096", "-p", "{port}"])
        .and(&["-s", &case.size.to_string()])
        .and(&["-n", &case.iters().to_string()]);
    if case.wait == Wait::Event {
        shared = shared.and(&["-e"]);
    }
    symmetric("ibv_rc_pingpong", options, &shared, "-d", |finished, _| {
        mean(number_before(&finished.stdout, "usec/iter")?)
    })
}

fn perftest(
    name: &'static str,
    options: &Options,
    case: &Case,
    parse: fn(&Finished, &Case) -> Option<Figures>,
) -> Contender {
    if case.wait == Wait::Hybrid {
        return unavailable(name, "either sleeps or polls");
    }
    let mut shared = words("-F")
        .and(&["-x", "1", "-p", "{port}"])
        .and(&["-n", &case.iters().max(case.batch).to_string()]);
    if !case.op.is_atomic() {
        shared = shared.and(&["-s", &case.size.to_string()]);
    }
    match case.op {
        Op::Cas => shared = shared.and(&["-A", "CMP_AND_SWAP"]),
        Op::Faa => shared = shared.and(&["-A", "FETCH_AND_ADD"]),
        Op::Read if name.ends_with("_bw") => shared = shared.and(&["-o", "16"]),
        Op::Send if name.ends_with("_lat") => shared = shared.and(&["-I", "0"]),
        Op::Send | Op::Write | Op::Read | Op::WriteImm => {}
    }
    if name.ends_with("_bw") {
        shared = shared
            .and(&["-t", &case.depth.to_string()])
            .and(&["-Q", &case.signal.to_string()]);
        if case.batch > 1 {
            shared = shared.and(&["-l", &case.batch.to_string()]);
        }
    }
    if case.wait == Wait::Event {
        shared = shared.and(&["-e"]);
    }
    symmetric(name, options, &shared, "-d", parse)
}

/// It cannot wait by event ("Events feature not available on WRITE verb"), so it polls in every row.
fn ib_write_bw(options: &Options, case: &Case) -> Contender {
    let polling = Case {
        wait: Wait::Spin,
        ..*case
    };
    Contender {
        name: if case.wait == Wait::Spin {
            "ib_write_bw"
        } else {
            "ib_write_bw (polling)"
        },
        ..perftest("ib_write_bw", options, &polling, rate)
    }
}

/// It runs for longer than the killing takes; what it says of single operations is nothing, so only its end is timed.
fn killed_ib_write_bw(options: &Options, case: &Case) -> Contender {
    let shared = words("-F")
        .and(&["-x", "1", "-p", "{port}", "-D", "60"])
        .and(&["-s", &case.size.to_string()])
        .and(&["-t", &case.depth.to_string()]);
    Contender {
        killed_after: Some(Duration::from_secs(2)),
        ..symmetric("ib_write_bw", options, &shared, "-d", |finished, _| {
            Some(Figures {
                truth_ms: Some(finished.elapsed.as_secs_f64() * 1e3),
                ..Figures::default()
            })
        })
    }
}

/// rsockets poll for 10 us and then sleep, which is nearest to our hybrid waiting.
fn rstream(options: &Options, case: &Case) -> Contender {
    match (case.mode, case.wait) {
        (Mode::Latency, Wait::Hybrid) => stream("rstream", options, case, |finished, _| {
            mean(2.0 * last_number(&finished.stdout)?) // it says the time of one direction
        }),
        (Mode::Rate, _) if case.batch == 1 => stream("rstream", options, case, stream_rate),
        (Mode::Rate, _) => unavailable("rstream", "has no batches"),
        _ => unavailable("rstream", "polls 10 us, then sleeps: see the hybrid row"),
    }
}

fn riostream(options: &Options, case: &Case) -> Contender {
    if case.batch > 1 {
        return unavailable("riostream", "has no batches");
    }
    stream("riostream", options, case, stream_rate)
}

fn stream_rate(finished: &Finished, case: &Case) -> Option<Figures> {
    per_second(1e6 / last_number(&finished.stdout)?, f64::from(case.size))
}

/// One message each way in turn for a latency; for a rate all of them one way, then all the other way.
fn stream(
    name: &'static str,
    options: &Options,
    case: &Case,
    parse: fn(&Finished, &Case) -> Option<Figures>,
) -> Contender {
    let (server, client) = (options.server.to_string(), options.client.to_string());
    let iters = case.iters().to_string();
    let (transfers, turns) = match case.mode {
        Mode::Rate => (iters.as_str(), "1"),
        _ => ("1", iters.as_str()),
    };
    let shared = words("-p")
        .and(&["{port}", "-T", "b", "-S", &case.size.to_string()])
        .and(&["-C", transfers, "-I", turns]);
    Contender {
        name,
        ready: Ready::AfterAWhile,
        commands: Ok(Commands {
            server: words(name).and(&["-b", &server]).and(&shared),
            client: words(name)
                .and(&["-s", &server, "-b", &client])
                .and(&shared),
        }),
        parse,
        killed_after: None,
    }
}

fn tcp(options: &Options, case: &Case) -> Contender {
    if case.wait != Wait::Event {
        return unavailable("TCP", "its sockets sleep: see the event row");
    }
    let (server, client) = (options.server.to_string(), options.client.to_string());
    let mode = case.mode.to_string();
    let shared = words(&mode)
        .and(&[case.size.to_string()])
        .and(&[case.iters().to_string()]);
    let program = options.tcp.to_string_lossy();
    Contender {
        name: "TCP",
        ready: Ready::SaysSo,
        commands: Ok(Commands {
            server: words(&program)
                .and(&["server", &server, "{port}"])
                .and(&shared),
            client: words(&program)
                .and(&["client", &client, &server, "{port}"])
                .and(&shared),
        }),
        parse: json,
        killed_after: None,
    }
}

/// A cycle of rping is six operations, so it has no place among the best peers; it shows what one cycle costs.
fn rping(options: &Options, case: &Case) -> Contender {
    if case.wait != Wait::Event {
        return unavailable("rping", "sleeps: see the event row");
    }
    let (server, client) = (options.server.to_string(), options.client.to_string());
    let shared = words("-p")
        .and(&["{port}", "-S", &case.size.to_string()])
        .and(&["-C", &case.iters().to_string()]);
    Contender {
        name: "rping (a cycle of 6)",
        ready: Ready::AfterAWhile,
        commands: Ok(Commands {
            server: words("rping").and(&["-s", "-a", &server]).and(&shared),
            client: words("rping")
                .and(&["-c", "-a", &server, "-I", &client])
                .and(&shared),
        }),
        parse: |finished, case| {
            mean(finished.elapsed.as_secs_f64() * 1e6 / f64::from(case.iters()))
        },
        killed_after: None,
    }
}

fn cmtime(options: &Options, case: &Case) -> Contender {
    let (server, client) = (options.server.to_string(), options.client.to_string());
    let count = case.iters().to_string();
    let shared = words("-p").and(&["{port}", "-c", &count]);
    Contender {
        name: "cmtime",
        ready: Ready::AfterAWhile,
        commands: Ok(Commands {
            server: words("cmtime").and(&["-b", &server]).and(&shared),
            client: words("cmtime")
                .and(&["-s", &server, "-b", &client])
                .and(&shared),
        }),
        parse: cmtime_phases,
        killed_after: None,
    }
}

/// `connect      :       56.82      40.84   18449.00    2840.90`: the last number is microseconds a connection.
fn cmtime_phases(finished: &Finished, _: &Case) -> Option<Figures> {
    let phase = |wanted: &str| {
        let mut lines = finished
            .stdout
            .lines()
            .filter_map(|line| line.split_once(':'));
        let (_, numbers) = lines.find(|(name, _)| name.trim() == wanted)?;
        last_number(numbers)
    };
    Some(Figures {
        resolve_us: Some(phase("resolve addr")? + phase("resolve route")?),
        create_us: phase("create qp"),
        connect_us: phase("connect"),
        disconnect_us: phase("disconnect"),
        destroy_us: phase("destroy"),
        ..Figures::default()
    })
}

fn json(finished: &Finished, _: &Case) -> Option<Figures> {
    serde_json::from_str(finished.stdout.lines().last()?).ok()
}

fn mean(us: f64) -> Option<Figures> {
    Some(Figures {
        mean_us: Some(us),
        ops_per_s: Some(1e6 / us),
        ..Figures::default()
    })
}

fn per_second(ops: f64, size: f64) -> Option<Figures> {
    Some(Figures {
        mean_us: Some(1e6 / ops),
        ops_per_s: Some(ops),
        mb_per_s: Some(ops * size / 1e6),
        ..Figures::default()
    })
}

/// perftest's table of times: bytes, iterations, min, max, typical, average, deviation, 99 %, 99.9 %.
fn latency(finished: &Finished, _: &Case) -> Option<Figures> {
    let row = numeric_row(&finished.stdout, 8)?;
    Some(Figures {
        p50_us: Some(row[4]),
        p99_us: Some(row[7]),
        mean_us: Some(row[5]),
        ops_per_s: Some(1e6 / row[5]),
        ..Figures::default()
    })
}

/// The same where perftest has halved the round trip.
fn half_latency(finished: &Finished, case: &Case) -> Option<Figures> {
    let half = latency(finished, case)?;
    let twice = |value: Option<f64>| value.map(|us| 2.0 * us);
    Some(Figures {
        p50_us: twice(half.p50_us),
        p99_us: twice(half.p99_us),
        mean_us: twice(half.mean_us),
        ops_per_s: half.ops_per_s.map(|rate| rate / 2.0),
        ..half
    })
}

/// perftest's table of rates: bytes, iterations, peak, average, millions of messages a second.
fn rate(finished: &Finished, case: &Case) -> Option<Figures> {
    let row = numeric_row(&finished.stdout, 5)?;
    per_second(row[4] * 1e6, f64::from(case.size))
}

/// The last line that begins with so many numbers.
fn numeric_row(text: &str, columns: usize) -> Option<Vec<f64>> {
    text.lines().rev().find_map(|line| {
        let row: Vec<f64> = line
            .split_whitespace()
            .map_while(|word| word.parse().ok())
            .collect();
        (row.len() >= columns).then_some(row)
    })
}

fn number_before(text: &str, unit: &str) -> Option<f64> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let at = words.iter().position(|word| *word == unit)?;
    words.get(at.checked_sub(1)?)?.parse().ok()
}

fn last_number(text: &str) -> Option<f64> {
    text.split_whitespace().last()?.parse().ok()
}

type Words = Vec<String>;

fn words(first: &str) -> Words {
    vec![first.to_owned()]
}

trait And {
    fn and<S: ToString>(self, more: &[S]) -> Words;
}

impl And for Words {
    fn and<S: ToString>(mut self, more: &[S]) -> Words {
        self.extend(more.iter().map(ToString::to_string));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_row_of_numbers_is_found_among_the_words() {
        let text = " #bytes #iterations t_min\n 64 1000 1.5 2.5 3.5\n----\n";
        assert_eq!(
            numeric_row(text, 5),
            Some(vec![64.0, 1000.0, 1.5, 2.5, 3.5])
        );
        assert_eq!(numeric_row(text, 6), None);
    }

    #[test]
    fn the_number_before_a_unit_is_found() {
        assert_eq!(
            number_before("1000 iters in 0.07 seconds = 69.59 usec/iter", "usec/iter"),
            Some(69.59)
        );
    }
}
