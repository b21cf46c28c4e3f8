package bus

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"github.com/kvscout/kvscout/protocol"
	"github.com/kvscout/kvscout/scheduler/internal/textfile"
)

// answerWithin is how long an agent may take for the whole answer to a
// snapshot request.
const answerWithin = time.Minute

// parseUsers reads who may use the embedded server, a line each:
//
//	scheduler <public nkey>
//	agent     <public nkey> <namespace>
//	agent     <public nkey> <namespace>/<pod uid>
//
// Namespace and pod uid are those that the agent was given. Empty lines and what
// follows a '#' count for nothing.
func parseUsers(text string, subjects protocol.Subjects) ([]*server.NkeyUser, error) {
	var users []*server.NkeyUser
	lineOf := make(map[string]int)
	err := textfile.Lines(text, func(number int, words []string) error {
		user, err := parseUser(words, subjects)
		if err == nil && lineOf[user.Nkey] > 0 {
			err = fmt.Errorf("the key of line %d again", lineOf[user.Nkey])
		}
		if err != nil {
			return err
		}
		lineOf[user.Nkey] = number
		users = append(users, user)
		return nil
	})
	return users, err
}

func parseUser(words []string, subjects protocol.Subjects) (*server.NkeyUser, error) {
	// The key is never quoted: it may be a seed, put there by mistake.
	if len(words) < 2 || !nkeys.IsValidPublicUserKey(words[1]) {
		return nil, errors.New("the second word must be the public nkey of a user, which begins with U")
	}
	user := &server.NkeyUser{Nkey: words[1]}
	switch {
	case words[0] == "scheduler" && len(words) == 2:
		user.Permissions = schedulerRights(subjects)
	case words[0] == "agent" && len(words) == 3:
		namespace, uid, one := strings.Cut(words[2], "/")
		if !one {
			uid = "any"
		}
		if namespace == "" || uid == "" || strings.ContainsAny(words[2], "*>") {
			return nil, fmt.Errorf("%.80q is neither <namespace> nor <namespace>/<pod uid>", words[2])
		}
		id := protocol.Identity(namespace, uid, 0) // as the agent makes it
		if !one {
			id.PodUID = "*"
		}
		user.Permissions = agentRights(subjects, id.Namespace+"_"+id.PodUID+"_*")
	default:
		return nil, errors.New("must be: scheduler <key>, or: agent <key> <namespace>[/<pod uid>]")
	}
	return user, nil
}

// agentRights lets an agent speak for the members of the pattern, answer who
// asks it, and hear what is made of them.
func agentRights(s protocol.Subjects, members string) *server.Permissions {
	return &server.Permissions{
		Publish:   &server.SubjectPermission{Allow: []string{s.Blocks(members), s.Load(members)}},
		Subscribe: &server.SubjectPermission{Allow: []string{s.Snapshot(members), s.Verdict(members)}},
		Response:  &server.ResponsePermission{MaxMsgs: protocol.MaxChunks, Expires: answerWithin},
	}
}

// schedulerRights lets a scheduler follow its pool, ask for snapshots, say what
// it makes of members, and talk to other schedulers.
func schedulerRights(s protocol.Subjects) *server.Permissions {
	return &server.Permissions{
		Publish:   &server.SubjectPermission{Allow: []string{s.Snapshot(protocol.Any), s.Verdict(protocol.Any), s.Picks()}},
		Subscribe: &server.SubjectPermission{Allow: []string{s.Blocks(protocol.Any), s.Load(protocol.Any), s.Inbox() + ".>", s.Picks()}},
	}
}

// readUsers reads the file of users, and returns its text to tell changes.
func readUsers(name string, subjects protocol.Subjects) ([]*server.NkeyUser, string, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, "", err
	}
	users, err := parseUsers(string(text), subjects)
	if err != nil {
		err = fmt.Errorf("%s: %w", name, err)
	}
	return users, string(text), err
}
