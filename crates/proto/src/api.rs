//! The public API. (to be written)
