//! What the whole-stack tests share.
