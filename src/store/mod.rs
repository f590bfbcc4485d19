//! Where model bytes come from. Knows the browser; what it hands on are plain bytes in file order.

pub mod source;
