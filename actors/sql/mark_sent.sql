-- Right after the server's 250; two that sent the same mail at once both were told so.
INSERT INTO posthouse.mails (event_id, kind)
VALUES (%(event_id)s, %(kind)s)
ON CONFLICT DO NOTHING
