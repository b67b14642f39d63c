//! Safe librdmacm.
