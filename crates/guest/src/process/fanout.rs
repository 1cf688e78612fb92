//! One command's output, to every subscriber.
//!
//! Owns: the subscribers' queues. Does not own: reading the output, or its encoding.
//!
//! Contract:
//! * A subscriber sees every event from the moment it joined, in order, without gaps, or its stream is cut: it is never
//!   given a stream with a hole in it.
//! * Memory is bounded: [`QUEUE`] events for each subscriber. A full queue holds up the reader, and so, through the pipe,
//!   the command itself. A lone slow reader is only that: back-pressure, however long it takes.
//! * When there are others, one that has taken nothing for [`PATIENCE`] is cut. Until then they wait for it.
//! * A subscriber that has gone away (its queue's receiver is dropped) is out at once, also in the middle of a send.
//! * With no subscriber, events are dropped.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use parking_lot::Mutex;
use tokio::sync::mpsc::{self, error::TrySendError};

/// Events that wait for one subscriber. With chunks of 32 KiB this is 256 KiB at most.
pub(crate) const QUEUE: usize = 8;
/// How long a subscriber may block the others.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// What a command did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// Bytes on standard output.
    Stdout(Bytes),
    /// Bytes on standard error.
    Stderr(Bytes),
    /// Bytes on the terminal.
    Pty(Bytes),
    /// It ended; nothing follows.
    End(super::End),
}

#[derive(Clone)]
struct Subscriber {
    id: u64,
    queue: mpsc::Sender<Event>,
}

#[derive(Default)]
struct Inner {
    subscribers: Vec<Subscriber>,
    next: u64,
    end: Option<super::End>,
}

/// The subscribers of one command.
#[derive(Default, Clone)]
pub(crate) struct Fanout {
    inner: Arc<Mutex<Inner>>,
}

impl Fanout {
    /// Joins. After the end, the queue holds just that event.
    pub(crate) fn subscribe(&self) -> mpsc::Receiver<Event> {
        let (tx, rx) = mpsc::channel(QUEUE);
        let mut inner = self.inner.lock();
        if let Some(end) = &inner.end {
            // A new queue has room.
            let _ = tx.try_send(Event::End(end.clone()));
        } else {
            let id = inner.next;
            inner.next += 1;
            inner.subscribers.push(Subscriber { id, queue: tx });
        }
        rx
    }

    /// Gives `event` to every subscriber; returns when each has it in its queue or is out.
    pub(crate) async fn send(&self, event: Event) {
        let subscribers = self.inner.lock().subscribers.clone();
        let others = subscribers.len() > 1;
        let mut gone = Vec::new();
        let mut full = Vec::new();
        for subscriber in subscribers {
            match subscriber.queue.try_send(event.clone()) {
                Ok(()) => {}
                Err(TrySendError::Closed(_)) => gone.push(subscriber.id),
                Err(TrySendError::Full(event)) => full.push((subscriber, event)),
            }
        }
        let waits = full.into_iter().map(|(subscriber, event)| async move {
            let sent = if others {
                tokio::time::timeout(PATIENCE, subscriber.queue.send(event))
                    .await
                    .is_ok_and(|sent| sent.is_ok())
            } else {
                self.send_alone(&subscriber, event).await
            };
            (!sent).then_some(subscriber.id)
        });
        gone.extend(join_all(waits).await.into_iter().flatten());
        if !gone.is_empty() {
            self.inner.lock().subscribers.retain(|subscriber| !gone.contains(&subscriber.id));
        }
    }

    /// Waits for the only subscriber for as long as it stays the only one; its patience starts when another joins.
    async fn send_alone(&self, subscriber: &Subscriber, event: Event) -> bool {
        loop {
            let patience = tokio::time::timeout(PATIENCE, subscriber.queue.reserve()).await;
            match patience {
                Ok(Ok(permit)) => {
                    permit.send(event);
                    return true;
                }
                Ok(Err(_)) => return false,
                Err(_) if self.inner.lock().subscribers.len() > 1 => return false,
                Err(_) => {}
            }
        }
    }

    /// Gives the end to every subscriber that has room within its patience, and to those who join later.
    pub(crate) async fn finish(&self, end: super::End) {
        let subscribers = {
            let mut inner = self.inner.lock();
            inner.end = Some(end.clone());
            std::mem::take(&mut inner.subscribers)
        };
        for subscriber in subscribers {
            let event = Event::End(end.clone());
            if let Err(TrySendError::Full(event)) = subscriber.queue.try_send(event) {
                // Its stream ends when it has read the rest; nobody waits for it here.
                tokio::spawn(async move { subscriber.queue.send(event).await });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::End;

    fn out(text: &'static str) -> Event {
        Event::Stdout(Bytes::from_static(text.as_bytes()))
    }

    #[tokio::test(start_paused = true)]
    async fn a_laggard_is_cut_and_the_others_lose_nothing() {
        let fanout = Fanout::default();
        let mut laggard = fanout.subscribe();
        let mut good = fanout.subscribe();
        let reader = tokio::spawn(async move {
            let mut count = 0;
            while let Some(Event::Stdout(_)) = good.recv().await {
                count += 1;
            }
            count
        });
        for _ in 0..QUEUE + 20 {
            fanout.send(out("x")).await;
        }
        fanout.finish(End::from_exit(crate::sys::wait::Exit::Code(0))).await;
        assert_eq!(reader.await.unwrap(), QUEUE + 20);
        let mut seen = 0;
        while let Some(event) = laggard.recv().await {
            assert!(matches!(event, Event::Stdout(_)), "a cut stream must not look finished");
            seen += 1;
        }
        assert_eq!(seen, QUEUE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lone_slow_reader_loses_nothing() {
        let fanout = Fanout::default();
        let mut slow = fanout.subscribe();
        let writer = fanout.clone();
        let task = tokio::spawn(async move {
            for _ in 0..QUEUE * 2 {
                writer.send(out("x")).await;
            }
        });
        tokio::time::sleep(PATIENCE * 10).await;
        for _ in 0..QUEUE * 2 {
            assert_eq!(slow.recv().await, Some(out("x")));
        }
        task.await.unwrap();
    }

    #[tokio::test]
    async fn a_dropped_subscriber_frees_a_blocked_send() {
        let fanout = Fanout::default();
        let gone = fanout.subscribe();
        for _ in 0..QUEUE {
            fanout.send(out("x")).await;
        }
        let writer = fanout.clone();
        let task = tokio::spawn(async move { writer.send(out("x")).await });
        tokio::task::yield_now().await;
        drop(gone);
        tokio::time::timeout(Duration::from_secs(1), task).await.unwrap().unwrap();
        assert!(fanout.inner.lock().subscribers.is_empty());
    }

    #[tokio::test]
    async fn who_comes_late_gets_the_end() {
        let fanout = Fanout::default();
        let end = End::from_exit(crate::sys::wait::Exit::Code(3));
        fanout.finish(end.clone()).await;
        assert_eq!(fanout.subscribe().recv().await, Some(Event::End(end)));
    }
}
