//! What the host and the guest's init say to each other.
//!
//! One virtio-serial port carries everything: the job to the guest, the command's standard input, and
//! back its output and exit status. One stream of frames, so that the exit status cannot overtake the
//! last byte of output, and standard input can end without the port closing.
//!
//! A frame is a kind (one byte), a length (four bytes, little endian) and that many bytes.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// One message, in either direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame {
    /// To the guest: what to run. Sent once, as the answer to [`Frame::Hello`].
    Job(Job),
    /// To the guest: bytes for the command's standard input.
    Stdin(Vec<u8>),
    /// To the guest: standard input has ended.
    StdinEnd,
    /// To the guest: the terminal has a new size.
    Resize(Size),
    /// To the host: init runs; the kernel's release.
    Hello(String),
    /// To the host: the devices are up, the command starts now.
    Ready,
    /// To the host: bytes the command wrote to its standard output.
    Stdout(Vec<u8>),
    /// To the host: bytes the command wrote to its standard error.
    Stderr(Vec<u8>),
    /// To the host: the command is over and all its output has been sent.
    Exit(i32),
    /// To the host: the command could not be started; which step failed, and the end of the kernel's log.
    Failed(String),
}

/// A command and the surroundings it is to find in the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Job {
    /// The program and its arguments.
    pub(crate) argv: Vec<OsString>,
    /// Its working directory.
    pub(crate) cwd: OsString,
    /// Its whole environment.
    pub(crate) env: Vec<(OsString, OsString)>,
    /// The terminal it is to run on; without one it gets three pipes.
    pub(crate) terminal: Option<Size>,
}

/// The size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) rows: u16,
    pub(crate) columns: u16,
}

impl Frame {
    /// Writes the frame to `out` and flushes.
    pub(crate) fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&self.encode())?;
        out.flush()
    }

    fn encode(&self) -> Vec<u8> {
        let (kind, payload): (u8, Vec<u8>) = match self {
            Frame::Job(job) => (1, job.encode()),
            Frame::Stdin(bytes) => (2, bytes.clone()),
            Frame::StdinEnd => (3, Vec::new()),
            Frame::Resize(size) => (4, size.encode().to_vec()),
            Frame::Hello(release) => (5, release.clone().into_bytes()),
            Frame::Ready => (6, Vec::new()),
            Frame::Stdout(bytes) => (7, bytes.clone()),
            Frame::Stderr(bytes) => (8, bytes.clone()),
            Frame::Exit(status) => (9, status.to_le_bytes().to_vec()),
            Frame::Failed(text) => (10, text.clone().into_bytes()),
        };
        let mut bytes = Vec::with_capacity(HEADER + payload.len());
        bytes.push(kind);
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(payload);
        bytes
    }

    fn decode(kind: u8, payload: &[u8]) -> io::Result<Frame> {
        let text = || String::from_utf8_lossy(payload).into_owned();
        Ok(match kind {
            1 => Frame::Job(Job::decode(payload)?),
            2 => Frame::Stdin(payload.to_vec()),
            3 => Frame::StdinEnd,
            4 => Frame::Resize(Size::decode(payload)?),
            5 => Frame::Hello(text()),
            6 => Frame::Ready,
            7 => Frame::Stdout(payload.to_vec()),
            8 => Frame::Stderr(payload.to_vec()),
            9 => Frame::Exit(i32::from_le_bytes(
                payload.try_into().map_err(|_| malformed("exit status"))?,
            )),
            10 => Frame::Failed(text()),
            _ => return Err(malformed("kind of frame")),
        })
    }
}

/// Cuts a stream of bytes into frames.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    pending: Vec<u8>,
}

impl Decoder {
    /// Takes the next bytes of the stream, however it was cut.
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// The next whole frame, `None` until more bytes are fed.
    ///
    /// # Errors
    /// `InvalidData` if the stream is not made of frames; it cannot be read any further then.
    pub(crate) fn frame(&mut self) -> io::Result<Option<Frame>> {
        let Some((header, rest)) = self.pending.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let [kind, length @ ..] = *header;
        let length = u32::from_le_bytes(length) as usize;
        if length > LONGEST {
            return Err(malformed("length"));
        }
        let Some(payload) = rest.get(..length) else {
            return Ok(None);
        };
        let frame = Frame::decode(kind, payload)?;
        self.pending.drain(..HEADER + length);
        Ok(Some(frame))
    }
}

impl Job {
    /// Strings closed by a NUL each (none can contain one), in a fixed order, lists led by their length.
    fn encode(&self) -> Vec<u8> {
        let mut strings: Vec<OsString> = vec![self.cwd.clone()];
        let (rows, columns) = self
            .terminal
            .map_or((0, 0), |size| (size.rows, size.columns));
        strings.push(format!("{rows} {columns}").into());
        strings.push(self.argv.len().to_string().into());
        strings.extend(self.argv.iter().cloned());
        for (name, value) in &self.env {
            strings.push(name.clone());
            strings.push(value.clone());
        }
        let mut bytes = Vec::new();
        for string in strings {
            bytes.extend_from_slice(string.as_bytes());
            bytes.push(0);
        }
        bytes
    }

    fn decode(payload: &[u8]) -> io::Result<Job> {
        let payload = payload.strip_suffix(&[0]).ok_or_else(|| malformed("job"))?;
        let mut strings = payload
            .split(|&byte| byte == 0)
            .map(|bytes| OsString::from_vec(bytes.to_vec()));
        let mut next = || strings.next().ok_or_else(|| malformed("job"));
        let cwd = next()?;
        let size = next()?.into_string().map_err(|_| malformed("job"))?;
        let terminal = match size.split_once(' ').map(|(r, c)| (r.parse(), c.parse())) {
            Some((Ok(0), Ok(0))) => None,
            Some((Ok(rows), Ok(columns))) => Some(Size { rows, columns }),
            _ => return Err(malformed("terminal size")),
        };
        let argc = next()?
            .to_str()
            .and_then(|n| n.parse().ok())
            .ok_or_else(|| malformed("job"))?;
        let argv = (0..argc).map(|_| next()).collect::<io::Result<_>>()?;
        let mut env = Vec::new();
        while let Ok(name) = next() {
            env.push((name, next()?));
        }
        Ok(Job {
            argv,
            cwd,
            env,
            terminal,
        })
    }
}

impl Size {
    fn encode(self) -> [u8; 4] {
        let [r0, r1] = self.rows.to_le_bytes();
        let [c0, c1] = self.columns.to_le_bytes();
        [r0, r1, c0, c1]
    }

    fn decode(payload: &[u8]) -> io::Result<Size> {
        let &[r0, r1, c0, c1] = payload else {
            return Err(malformed("terminal size"));
        };
        Ok(Size {
            rows: u16::from_le_bytes([r0, r1]),
            columns: u16::from_le_bytes([c0, c1]),
        })
    }
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("malformed {what} on the lab's port"),
    )
}

const HEADER: usize = 5;
/// Longer than any job; a larger length means that something else wrote to the port.
const LONGEST: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn decode_all(bytes: &[u8], step: usize) -> Vec<Frame> {
        let mut decoder = Decoder::default();
        let mut frames = Vec::new();
        for chunk in bytes.chunks(step) {
            decoder.feed(chunk);
            while let Some(frame) = decoder.frame().unwrap() {
                frames.push(frame);
            }
        }
        frames
    }

    #[test]
    fn frames_survive_any_cutting_of_the_stream() {
        let frames = vec![
            Frame::Hello("6.1.0".into()),
            Frame::Stdout(vec![0, 255, 10]),
            Frame::Stdin(Vec::new()),
            Frame::StdinEnd,
            Frame::Resize(Size {
                rows: 24,
                columns: 300,
            }),
            Frame::Exit(-7),
        ];
        let bytes: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
        for step in 1..=bytes.len() {
            assert_eq!(decode_all(&bytes, step), frames);
        }
    }

    #[test]
    fn a_job_keeps_empty_and_non_utf8_strings() {
        let job = Job {
            argv: vec![
                "sh".into(),
                "".into(),
                OsString::from_vec(vec![0xff, b'\n']),
            ],
            cwd: "/a b".into(),
            env: vec![("EMPTY".into(), "".into()), ("X".into(), "a=b".into())],
            terminal: Some(Size {
                rows: 1,
                columns: 2,
            }),
        };
        assert_eq!(Job::decode(&job.encode()).unwrap(), job);
    }

    #[test]
    fn a_job_without_environment_or_terminal_is_kept() {
        let job = Job {
            argv: vec!["true".into()],
            cwd: "/".into(),
            ..Job::default()
        };
        assert_eq!(Job::decode(&job.encode()).unwrap(), job);
    }

    #[test]
    fn a_stream_of_something_else_is_refused() {
        let mut decoder = Decoder::default();
        decoder.feed(b"login: what");
        assert!(decoder.frame().is_err());
    }
}
