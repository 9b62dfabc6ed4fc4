//! How much of the daemon's time each user may spend on looks. Pure: times go in.

use std::{collections::HashMap, time::Duration};

/// What a user who has asked for nothing lately may spend at once.
const CREDIT_MAX: Duration = Duration::from_millis(100);
/// One part of the time that passes is given to each user anew.
const SHARE: u32 = 5;
/// A sweep takes a walk of all tasks: the least time from one to the next of the same user.
const SWEEP_PERIOD: Duration = Duration::from_millis(10);
/// Users that are remembered.
const USERS: usize = 256;

#[derive(Clone, Copy, Debug)]
struct Account {
    /// Spent and not given back yet.
    debt: Duration,
    at: Duration,
    swept: Option<Duration>,
}

/// Times are those of any clock that does not go back.
#[derive(Clone, Debug, Default)]
pub struct Budget {
    accounts: HashMap<u32, Account>,
}

impl Budget {
    fn debt(&self, uid: u32, now: Duration) -> Duration {
        let Some(Account { debt, at, swept: _ }) = self.accounts.get(&uid) else { return Duration::ZERO };
        debt.saturating_sub(now.saturating_sub(*at) / SHARE)
    }

    /// `Err`: when to ask again. Root, who may read the pins, is not counted.
    pub fn may(&self, uid: u32, sweep: bool, now: Duration) -> Result<(), Duration> {
        if uid == 0 {
            return Ok(());
        }
        let over = self.debt(uid, now).saturating_sub(CREDIT_MAX) * SHARE;
        let swept = self.accounts.get(&uid).and_then(|account| account.swept).filter(|_| sweep);
        let early = swept.map_or(Duration::ZERO, |swept| (swept + SWEEP_PERIOD).saturating_sub(now));
        let wait = over.max(early);
        if wait.is_zero() { Ok(()) } else { Err(wait) }
    }

    pub fn spend(&mut self, uid: u32, sweep: bool, took: Duration, now: Duration) {
        if uid == 0 {
            return;
        }
        let debt = self.debt(uid, now) + took;
        let before = self.accounts.get(&uid).and_then(|account| account.swept);
        self.accounts.insert(uid, Account { debt, at: now, swept: if sweep { Some(now) } else { before } });
        if self.accounts.len() > USERS {
            let settled: Vec<u32> =
                self.accounts.keys().copied().filter(|uid| self.debt(*uid, now).is_zero()).collect();
            for uid in settled {
                self.accounts.remove(&uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn whoever_asks_at_times_is_never_refused() {
        let mut budget = Budget::default();
        for round in 0..1_000 {
            let now = ms(round * 50);
            assert_eq!(budget.may(1000, true, now), Ok(()), "round {round}");
            budget.spend(1000, true, ms(9), now);
        }
    }

    #[test]
    fn whoever_asks_all_the_time_gets_a_share_and_slows_nobody_else() {
        let mut budget = Budget::default();
        let (mut now, mut spent) = (ms(0), ms(0));
        while now < ms(60_000) {
            match budget.may(1000, false, now) {
                Ok(()) => {
                    now += ms(30);
                    spent += ms(30);
                    budget.spend(1000, false, ms(30), now);
                }
                Err(wait) => {
                    assert!(wait > ms(0));
                    now += wait;
                }
            }
            assert_eq!(budget.may(1001, false, now), Ok(()));
            assert_eq!(budget.may(0, true, now), Ok(()));
        }
        assert!((ms(11_000)..ms(13_000)).contains(&spent), "{spent:?} of 60 s");
    }

    #[test]
    fn sweeps_are_apart_and_looks_need_not_be() {
        let mut budget = Budget::default();
        budget.spend(1000, true, ms(1), ms(5));
        assert_eq!(budget.may(1000, true, ms(6)), Err(ms(9)));
        assert_eq!(budget.may(1000, false, ms(6)), Ok(()));
        budget.spend(1000, false, ms(1), ms(7));
        assert_eq!(budget.may(1000, true, ms(8)), Err(ms(7)), "a look in between changes nothing");
        assert_eq!(budget.may(1000, true, ms(15)), Ok(()));
    }

    #[test]
    fn users_long_gone_are_forgotten() {
        let mut budget = Budget::default();
        for uid in 1..10_000 {
            budget.spend(uid, true, ms(1), ms(u64::from(uid) * 10));
        }
        assert!(budget.accounts.len() <= USERS + 1, "{}", budget.accounts.len());
    }
}
