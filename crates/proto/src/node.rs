//! Internal API between control and node. (to be written)
