// Renders a chart with Go's own templates, without helm: `go run render.go TEMPLATES < CONTEXT.json`.
// Prints {"file": "text"}. Has only the functions that our chart uses; values must be merged already.
package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
)

func toInt(value any) int {
	switch number := value.(type) {
	case float64:
		return int(number)
	case int:
		return number
	}
	panic(fmt.Sprintf("%v is no number", value))
}

func fallback(otherwise any, value any) any {
	if isTrue, _ := template.IsTrue(value); isTrue {
		return value
	}
	return otherwise
}

// Lines of YAML in block style; others may follow at the same depth. Scalars are written as JSON, which YAML contains.
func lines(value any) []string {
	var found []string
	switch node := value.(type) {
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(node)) {
			found = append(found, entry(key+":", node[key], "  ")...)
		}
	case []any:
		for _, item := range node {
			found = append(found, entry("-", item, "  ")...)
		}
	}
	return found
}

func entry(head string, value any, pad string) []string {
	inner := lines(value)
	if len(inner) == 0 {
		text, err := json.Marshal(value)
		if err != nil {
			panic(err)
		}
		return []string{head + " " + string(text)}
	}
	found := []string{head}
	for _, line := range inner {
		found = append(found, pad+line)
	}
	return found
}

func functions(all *template.Template) template.FuncMap {
	return template.FuncMap{
		"include": func(name string, data any) (string, error) {
			var text bytes.Buffer
			err := all.ExecuteTemplate(&text, name, data)
			return text.String(), err
		},
		"toYaml": func(value any) string { return strings.Join(lines(value), "\n") },
		"nindent": func(width int, text string) string {
			pad := strings.Repeat(" ", width)
			return "\n" + pad + strings.ReplaceAll(text, "\n", "\n"+pad)
		},
		"quote":        func(value any) string { return fmt.Sprintf("%q", fmt.Sprint(value)) },
		"default":      fallback,
		"contains":     func(part, text string) bool { return strings.Contains(text, part) },
		"trunc":        func(most int, text string) string { return text[:min(most, len(text))] },
		"trimSuffix":   func(end, text string) string { return strings.TrimSuffix(text, end) },
		"int":          toInt,
		"add":          func(a, b any) int { return toInt(a) + toInt(b) },
		"div":          func(a, b any) int { return toInt(a) / toInt(b) },
		"list":         func(values ...any) []any { return values },
		"fail":         func(sentence string) (string, error) { return "", errors.New(sentence) },
		"lookup":       func(version, kind, namespace, name string) map[string]any { return nil },
		"randAlphaNum": func(length int) string { return strings.Repeat("x", length) },
		"b64enc":       func(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) },
	}
}

func render(folder string) (map[string]string, error) {
	var context map[string]any
	if err := json.NewDecoder(os.Stdin).Decode(&context); err != nil {
		return nil, err
	}
	all := template.New("chart").Option("missingkey=error")
	all.Funcs(functions(all))
	paths, err := filepath.Glob(filepath.Join(folder, "*"))
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		if _, err := all.New(filepath.Base(path)).Parse(string(text)); err != nil {
			return nil, err
		}
	}
	rendered := map[string]string{}
	for _, path := range paths {
		var text bytes.Buffer
		if err := all.ExecuteTemplate(&text, filepath.Base(path), context); err != nil {
			return nil, err
		}
		rendered[filepath.Base(path)] = text.String()
	}
	return rendered, nil
}

func main() {
	rendered, err := render(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	json.NewEncoder(os.Stdout).Encode(rendered)
}
