//! A reason that is told once, however often it is met, until it is another or is over.

#[derive(Debug, Default)]
pub struct Complaint(Option<String>);

impl Complaint {
    pub const fn none() -> Self {
        Self(None)
    }

    /// Whether it is another than the last time, and so to be told.
    pub fn is_news(&mut self, reason: &str) -> bool {
        let is_news = self.0.as_deref() != Some(reason);
        if is_news {
            self.0 = Some(reason.to_owned());
        }
        is_news
    }

    /// It is over; whether there was any.
    pub fn end(&mut self) -> bool {
        self.0.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_told_once_until_it_is_over() {
        let mut complaint = Complaint::none();
        assert!(!complaint.end());
        assert!(complaint.is_news("a") && !complaint.is_news("a"));
        assert!(complaint.is_news("b") && complaint.is_news("a"));
        assert!(complaint.end() && complaint.is_news("a"));
    }
}
