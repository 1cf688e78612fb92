//! The few ioctls that rustix has no safe form for: network interface, entropy pool, terminal size.
#![allow(unsafe_code)]

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketType, socket};

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// An interface named `name` with everything else zero.
fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: ifreq is plain data for which all-zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let inet = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from(address).to_be() },
        sin_zero: [0; 8],
    };
    // SAFETY: both are 16 bytes of plain data, and sockaddr is defined to be read by its family.
    unsafe { std::mem::transmute::<libc::sockaddr_in, libc::sockaddr>(inet) }
}

fn control_socket() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::INET, SocketType::DGRAM, None)?)
}

/// Brings an interface up.
///
/// # Errors
/// When the interface does not exist.
pub(crate) fn interface_up(name: &str) -> io::Result<()> {
    let socket = control_socket()?;
    let mut request = request(name)?;
    // SAFETY: `request` is a valid ifreq that the kernel reads and writes during the call; the union field that is
    // touched is the one that these two requests define.
    unsafe {
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS as _, &mut request))?;
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as i16;
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &request))
    }
}

/// Gives an interface its IPv4 address.
///
/// # Errors
/// When the interface does not exist.
pub(crate) fn set_address(name: &str, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
    let socket = control_socket()?;
    let mask = Ipv4Addr::from(u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0));
    for (code, value) in [(libc::SIOCSIFADDR, address), (libc::SIOCSIFNETMASK, mask)] {
        let mut request = request(name)?;
        request.ifr_ifru.ifru_addr = socket_address(value);
        // SAFETY: `request` is a valid ifreq for the duration of the call.
        unsafe { check(libc::ioctl(socket.as_raw_fd(), code as _, &request))? };
    }
    Ok(())
}

/// Adds the default route.
///
/// # Errors
/// When the gateway is not on a network that is up.
pub(crate) fn default_route(gateway: Ipv4Addr) -> io::Result<()> {
    let socket = control_socket()?;
    // SAFETY: rtentry is plain data for which all-zero is valid.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = socket_address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    // SAFETY: `route` is a valid rtentry; its device pointer is null, which means "find it".
    unsafe { check(libc::ioctl(socket.as_raw_fd(), libc::SIOCADDRT as _, &route)) }
}

/// Enters a neighbour for ever, so that no ARP is needed to reach it.
///
/// # Errors
/// When the interface does not exist.
pub(crate) fn permanent_neighbour(name: &str, address: Ipv4Addr, mac: [u8; 6]) -> io::Result<()> {
    let socket = control_socket()?;
    // SAFETY: arpreq is plain data for which all-zero is valid.
    let mut entry: libc::arpreq = unsafe { std::mem::zeroed() };
    entry.arp_pa = socket_address(address);
    entry.arp_ha.sa_family = libc::ARPHRD_ETHER;
    for (to, from) in entry.arp_ha.sa_data.iter_mut().zip(mac) {
        *to = from as libc::c_char;
    }
    entry.arp_flags = libc::ATF_PERM | libc::ATF_COM;
    for (to, from) in entry.arp_dev.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    // SAFETY: `entry` is a valid arpreq for the duration of the call.
    unsafe { check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSARP as _, &entry)) }
}

#[repr(C)]
struct Entropy {
    bits: libc::c_int,
    bytes: libc::c_int,
    data: [u8; 256],
}

const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

/// Feeds bytes to the kernel's pool as full entropy (at most 256 count) and reseeds the generator from it, so that two
/// copies of one memory image differ from here on.
///
/// # Errors
/// When the caller is not root.
pub(crate) fn add_entropy(random: impl AsFd, data: &[u8]) -> io::Result<()> {
    let mut entropy = Entropy { bits: 0, bytes: 0, data: [0; 256] };
    let count = data.len().min(entropy.data.len());
    entropy.data[..count].copy_from_slice(&data[..count]);
    entropy.bits = count as libc::c_int * 8;
    entropy.bytes = count as libc::c_int;
    let fd = random.as_fd().as_raw_fd();
    // SAFETY: `entropy` has the layout of rand_pool_info followed by `bytes` bytes, all within the struct.
    unsafe {
        check(libc::ioctl(fd, RNDADDENTROPY as _, &entropy))?;
        check(libc::ioctl(fd, RNDRESEEDCRNG as _))
    }
}
