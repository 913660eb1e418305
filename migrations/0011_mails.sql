-- Which mails were accepted by the mail server: an attempt that finds its mail here sends nothing. Goes with its event.
CREATE TABLE posthouse.mails (
    event_id uuid NOT NULL REFERENCES posthouse.events (id) ON DELETE CASCADE,
    kind text NOT NULL,
    sent_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (event_id, kind)
);
