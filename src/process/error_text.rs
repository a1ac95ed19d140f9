//! The text of an error with its causes.

/// An error with its causes, each once: some errors include the text of their cause in their own.
#[must_use]
pub fn with_causes(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match text.as_str() {
        "" => cause,
        text if text.contains(&cause) => text.into(),
        text => format!("{text}: {cause}"),
    })
}

#[cfg(test)]
mod tests {
    use super::with_causes;

    #[test]
    fn a_cause_is_printed_once() {
        let cause = || anyhow::anyhow!("no such file");
        assert_eq!(with_causes(&cause().context("key = \"/x\": no such file")), "key = \"/x\": no such file");
        assert_eq!(
            with_causes(&cause().context("cannot read the key").context("cannot start")),
            "cannot start: cannot read the key: no such file"
        );
    }
}
