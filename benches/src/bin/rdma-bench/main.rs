//! One measurement on `rdma-msg`: the twin of the C floor, step for step, with the same options, the same messages on
//! the wire and the same line of JSON at the end. Either side can be the floor's.
//!
//! It is written as a program that uses the library would be; what the library costs over the floor is what the
//! difference shows.

mod connect;
mod latency;
mod link;
mod rate;
mod sys;
mod truth;
mod yardstick;

use std::error::Error;
use std::io::{self, Write};

use clap::{Parser, Subcommand};
use rdma_bench::record::Figures;
use rdma_bench::spec::{Mode, Spec};
use rdma_msg::Listener;

use link::Link;

#[derive(Parser)]
#[command(about, version, args_override_self = true)]
struct Options {
    #[command(subcommand)]
    side: Side,
}

#[derive(Subcommand)]
enum Side {
    /// Listen, and do what the client's measurement needs
    #[command(args_override_self = true)]
    Server(Spec),
    /// Connect, measure, and print a line of JSON
    #[command(args_override_self = true)]
    Client(Spec),
}

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let side = Options::parse().side;
    let (Side::Server(spec) | Side::Client(spec)) = &side;
    spec.check()?;
    sys::alarm(spec.limit);
    match &side {
        Side::Server(spec) => server(spec),
        Side::Client(spec) => {
            let figures = client(spec)?;
            println!("{}", line(spec, &figures)?);
            Ok(())
        }
    }
}

fn client(spec: &Spec) -> Result<Figures> {
    if spec.mode == Mode::Connect {
        return connect::client(spec);
    }
    let link = Link::connect(spec)?;
    match spec.mode {
        Mode::Latency => latency::client(&link),
        Mode::Rate => rate::client(&link),
        Mode::Truth => truth::client(&link),
        Mode::Connect => unreachable!("handled above"),
    }
}

fn server(spec: &Spec) -> Result<()> {
    let prepared = link::Prepared::new(spec)?;
    let listener = Listener::bind(spec.local(spec.port), &prepared.config)?;
    println!("listening");
    io::stdout().flush()?;
    if spec.mode == Mode::Connect {
        return connect::server(spec, &listener);
    }
    let link = Link::accept(prepared, &listener)?;
    match spec.mode {
        Mode::Latency => latency::server(&link),
        Mode::Rate => rate::server(&link),
        Mode::Truth | Mode::Connect => {
            link.wait_for_the_end();
            Ok(())
        }
    }
}

/// What was measured and what came out, in one object.
fn line(spec: &Spec, figures: &Figures) -> Result<String> {
    let Spec {
        mode,
        op,
        wait,
        size,
        iters,
        depth,
        batch,
        signal,
        inline,
        ..
    } = spec;
    let mut line = serde_json::json!({
        "mode": mode, "op": op, "wait": wait, "size": size, "iters": iters,
        "depth": depth, "batch": batch, "signal": signal, "inline": inline,
    });
    let figures = serde_json::to_value(figures)?;
    for (key, value) in figures.as_object().into_iter().flatten() {
        if !value.is_null() {
            line[key] = value.clone();
        }
    }
    Ok(line.to_string())
}
