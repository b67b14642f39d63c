//! How every example starts and how it ends: arguments, logging, one line for an error.

use std::error::Error as StdError;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::process::ExitCode;

use clap::Parser;

/// What an example's `main` gives up with: any error, its chain of causes kept.
pub type Error = Box<dyn StdError + Send + Sync>;

/// The result of an example's steps.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Parses the arguments, starts the log, runs `body`, and turns its error into one line on
/// stderr and exit status 1.
///
/// Wrong arguments end with status 1 too, after clap's explanation; `--help` and `--version` with 0.
pub fn run<A: Parser>(name: &str, body: impl FnOnce(A) -> Result<()>) -> ExitCode {
    let args = match A::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print(); // nobody to tell if stderr is closed
            return if error.use_stderr() {
                ExitCode::FAILURE
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    env_logger::init();
    match body(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {}", chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// An address as an argument: `HOST` or `HOST:PORT`, IPv6 with a port in brackets.
///
/// Without a port it is `default_port`; a name is looked up, its first address taken.
///
/// # Errors
/// If the name is not known, or the text is no address.
pub fn address(text: &str, default_port: u16) -> Result<SocketAddr> {
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, default_port));
    }
    let with_port = text
        .rsplit_once(':')
        .is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let found = if with_port {
        text.to_socket_addrs()
    } else {
        (text, default_port).to_socket_addrs()
    };
    let mut found = found.during(|| format!("look up {text:?}"))?;
    found
        .next()
        .ok_or_else(|| format!("look up {text:?}: no address").into())
}

/// The error and all its sources in one line, each separated by `: `.
///
/// A source whose text its parent already ends with is not repeated.
pub fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let text = cause.to_string();
        if !line.ends_with(&text) {
            let _ = write!(line, ": {text}"); // writing to a String cannot fail
        }
        source = cause.source();
    }
    line
}

/// An error of the example's own: a text, and what led to it.
#[derive(Debug)]
pub struct Context {
    text: String,
    source: Error,
}

impl std::fmt::Display for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl StdError for Context {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(self.source.as_ref())
    }
}

/// Says what the program was about to do when an error came.
pub trait During<T> {
    /// Wraps the error: its text becomes `doing`, its source the old error.
    ///
    /// # Errors
    /// The same as before, wrapped.
    fn during(self, doing: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<Error>> During<T> for std::result::Result<T, E> {
    fn during(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| {
            Context {
                text: doing(),
                source: source.into(),
            }
            .into()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chain_names_every_cause_once() {
        let refused: Result<(), _> = Err(std::io::Error::other("connection refused"));
        let error = refused.during(|| "connect to ::1".into()).unwrap_err();
        let again: Result<()> = Err::<(), _>(error).during(|| "echo".into());
        assert_eq!(
            chain(again.unwrap_err().as_ref()),
            "echo: connect to ::1: connection refused"
        );
    }

    #[test]
    fn an_address_needs_no_port_and_no_brackets() {
        let parsed = |text| address(text, 7471).unwrap().to_string();
        assert_eq!(parsed("192.168.99.2"), "192.168.99.2:7471");
        assert_eq!(parsed("192.168.99.2:18515"), "192.168.99.2:18515");
        assert_eq!(parsed("fd00::2"), "[fd00::2]:7471");
        assert_eq!(parsed("[fd00::2]:18515"), "[fd00::2]:18515");
        assert!(address("256.1.1.1:99999", 1).is_err());
    }

    #[test]
    fn a_cause_that_its_parent_already_prints_is_not_repeated() {
        let io = std::io::Error::other("no route");
        let error = Context {
            text: "resolve: no route".into(),
            source: io.into(),
        };
        assert_eq!(chain(&error), "resolve: no route");
    }
}
