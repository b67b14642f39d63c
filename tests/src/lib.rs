//! What the whole-stack tests share, and the documents whose code must compile.

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
