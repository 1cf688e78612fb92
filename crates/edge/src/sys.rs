//! The crate's only unsafe code: the host's own addresses, which the C library alone hands out.
//!
//! Contract: no function here keeps a pointer after it returns.
#![allow(unsafe_code)]

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Frees the list of `getifaddrs` on every way out.
struct List(*mut libc::ifaddrs);

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a successful getifaddrs and is freed once, here.
        unsafe { libc::freeifaddrs(self.0) }
    }
}

/// Every address configured on an interface of this network namespace.
pub(crate) fn host_addresses() -> io::Result<Vec<IpAddr>> {
    let mut head: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `head` is a valid place for one pointer.
    if unsafe { libc::getifaddrs(&mut head) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let list = List(head);
    let mut found = Vec::new();
    let mut at = list.0;
    while !at.is_null() {
        // SAFETY: `at` is null or a node of the list, which lives until `list` is dropped.
        let node = unsafe { &*at };
        at = node.ifa_next;
        if node.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: a non-null ifa_addr points at a sockaddr of at least the family field.
        match i32::from(unsafe { (*node.ifa_addr).sa_family }) {
            libc::AF_INET => {
                // SAFETY: family AF_INET means the address is a sockaddr_in; it may be unaligned for us.
                let v4 = unsafe { std::ptr::read_unaligned(node.ifa_addr.cast::<libc::sockaddr_in>()) };
                found.push(IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr))));
            }
            libc::AF_INET6 => {
                // SAFETY: family AF_INET6 means the address is a sockaddr_in6.
                let v6 = unsafe { std::ptr::read_unaligned(node.ifa_addr.cast::<libc::sockaddr_in6>()) };
                found.push(IpAddr::V6(Ipv6Addr::from(v6.sin6_addr.s6_addr)));
            }
            _ => {}
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    #[test]
    fn loopback_is_among_the_host_addresses() {
        let found = super::host_addresses().unwrap();
        assert!(found.contains(&std::net::IpAddr::from([127, 0, 0, 1])), "{found:?}");
    }
}
